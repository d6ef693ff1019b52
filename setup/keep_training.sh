#!/usr/bin/env bash
# A door to motley.provision.keep_training, which has the words of -h.
source "$(dirname -- "${BASH_SOURCE[0]}")/door.sh"
