#!/usr/bin/env bash
# Have a host that was away take part in training again; see leave_cn.sh.
#
#   bash setup/join_cn.sh ecetesla1
#   bash setup/join_cn.sh ecetesla1 ecetesla3 --dry-run
#
# A run under setup/keep_training.sh asks once a minute, and takes the host back at a step
# boundary when what is left to train gains more by that than the new start costs. Other
# runs take it when they are started anew.
#
# Options:
#   --hostfile FILE   the hosts that there are; default: hosts.txt in the repository
#   --dry-run         say who is away, and change nothing
#
# Exit status: 0 all take part, 1 some host could not be asked, 2 nothing was begun.
source "$(dirname -- "${BASH_SOURCE[0]}")/door.sh"
