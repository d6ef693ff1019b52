#!/usr/bin/env bash
# Have a host leave training after the step that it is in, since somebody needs it.
#
#   bash setup/leave_cn.sh ecetesla1              # until: bash setup/join_cn.sh ecetesla1
#   bash setup/leave_cn.sh ecetesla1 --for 2h     # or 30m, 1d, 90s, 1h30m
#   bash setup/leave_cn.sh ecetesla1 ecetesla3 --dry-run
#
# Type it on any host that reaches the named ones by ssh, or on one of them. All training
# of yours there ends after its current step, and nothing of it is lost: what was trained
# is saved first, by all ranks together. A run under setup/keep_training.sh goes on with
# its other hosts, and takes this one back when it has come back; any other run ends, and
# says how to continue it. Until then no run takes the host: a mark in /tmp/motley-UID
# there says so, which also goes when the host is booted.
#
# The kernel lets nobody but you, and root, send the signal that this takes. What else
# runs there, of you or of others, is not touched.
#
# Refused, and nothing is done: a host that no hostfile names, one where no training of
# yours runs, and all hosts of a run, which would end it.
#
# Options:
#   --for TIME        come back by itself after this time; default: stay away
#   --hostfile FILE   the hosts that there are; default: hosts.txt in the repository
#   --dry-run         say what would leave, and change nothing
#
# Exit status: 0 they have left, 1 some host has not, 2 nothing was begun.
source "$(dirname -- "${BASH_SOURCE[0]}")/door.sh"
