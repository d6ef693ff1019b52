#!/usr/bin/env bash
# A door to motley.provision.change_cn_shell, which has the words of -h.
source "$(dirname -- "${BASH_SOURCE[0]}")/door.sh"
