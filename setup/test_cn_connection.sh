#!/usr/bin/env bash
# A door to motley.provision.test_cn_connection, which has the words of -h.
source "$(dirname -- "${BASH_SOURCE[0]}")/door.sh"
