#!/usr/bin/env bash
# A door to motley.provision.test_mpi, which has the words of -h.
source "$(dirname -- "${BASH_SOURCE[0]}")/door.sh"
