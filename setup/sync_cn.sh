#!/usr/bin/env bash
# Bring this repository's files to every host of hosts.txt that has a folder of
# its own.
#
#   bash setup/sync_cn.sh
#   bash setup/sync_cn.sh --dry-run         # what differs, and where
#   bash setup/sync_cn.sh --hostfile my_hosts.txt
#
# Sent to the same path is what git tracks and differs there; a host that shares
# this folder (NFS) needs nothing. What only the host has stays. An edit made on
# a host is overwritten.
#
# Options:
#   --hostfile FILE   default: hosts.txt in the repository
#   --dry-run         print every change, do none
#
# Exit status: 0 all hosts have the same files, 1 some host has not, 2 nothing
# was begun.
source "$(dirname -- "${BASH_SOURCE[0]}")/door.sh"
