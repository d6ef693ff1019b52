#!/usr/bin/env bash
# A door to motley.provision.sync_cn, which has the words of -h.
source "$(dirname -- "${BASH_SOURCE[0]}")/door.sh"
