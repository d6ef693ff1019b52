#!/usr/bin/env bash
# Keep a training alive over lost machines: run an mpirun line, and run it again
# with the machines that are left when one of them dies.
#
#   bash setup/keep_training.sh mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh
#   bash setup/keep_training.sh --restarts 3 mpirun -np 2 --hostfile hosts.txt ./entry_cn.sh torch_dist/train_vit.py --epochs 2
#   bash setup/keep_training.sh --dry-run mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh
#
# The line is what you would type; what follows ./entry_cn.sh may be any training
# script and its options. Before each start all hosts are asked by ssh, at once, and
# who does not answer is left out: its ranks go, and their places in --shares,
# --precision and --micro-batch. When the run ends by a lost rank or host, it goes on
# from the last finished step, which those that were left have saved, with the same
# batches and samples. A host that answers again takes part from the next start on.
#
# It gives up, and says why, where going on makes no sense: a wrong option, a loss
# that is not finite, or faults again and again without a step in between. Ctrl-C
# ends it at once. Under Slurm's srun the same line is run again.
#
# Options, before the line:
#   --restarts N   faults in a row without progress before it gives up; default 3
#   --dry-run      say which line would be run, and with whom; run nothing
#
# Exit status: that of the last run; 2 nothing was begun.
source "$(dirname -- "${BASH_SOURCE[0]}")/door.sh"
