#!/usr/bin/env bash
# Find your own training processes that nobody waits for any more, on all hosts
# of hosts.txt at once, and end them after your yes. Whose other processes hold
# GPU memory is shown beside.
#
#   bash setup/clean_cn.sh
#   bash setup/clean_cn.sh --dry-run      # only look
#   bash setup/clean_cn.sh --yes          # end leftovers without asking
#   bash setup/clean_cn.sh --running      # and what still runs, or may
#
# A process is ours if it is yours and runs a script of this repository as
# entry_cn.sh does (or is that one's data worker, MPI daemon or mpirun). It is
#   leftover   its mpirun is gone
#   running    its mpirun lives
#   unknown    its mpirun was on a host that was not asked, or somebody's hand
#              started it
# Each is ended by its pid and the time it started: SIGTERM, after 3 s SIGKILL.
# Processes of others, and yours that are not of this repository, are never
# touched.
#
# Options:
#   --hostfile FILE   default: hosts.txt in the repository
#   --running         end what runs, or may, too
#   --yes             ask nothing
#   --dry-run         print every change, do none
#
# Exit status: 0 nothing is left over (or --dry-run), 1 something is or some
# host could not be asked, 2 nothing was begun.
source "$(dirname -- "${BASH_SOURCE[0]}")/door.sh"
