#!/usr/bin/env bash
# Keep a training alive over lost machines: run an mpirun line, and run it again
# with the machines that are left when one of them dies.
#
#   bash setup/keep_training.sh mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh
#   bash setup/keep_training.sh --restarts 3 mpirun -np 2 --hostfile hosts.txt ./entry_cn.sh torch_dist/train_vit.py --epochs 2
#   bash setup/keep_training.sh --dry-run mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh
#   bash setup/keep_training.sh --polite mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh
#
# The line is what you would type; what follows ./entry_cn.sh may be any training
# script and its options. Before each start all hosts are asked by ssh, at once, and
# who does not answer is left out: its ranks go, and their places in --shares,
# --precision and --micro-batch. When the run ends by a lost rank or host, it goes on
# from the last finished step, which those that were left have saved, with the same
# batches and samples.
#
# Ranks can save, or go on, only where the launcher leaves them alive. This script sets the options
# of Open MPI 4.1, Open MPI 5 and srun for that, as variables; your own options and variables go
# before them. Before the first start it tries the line for some seconds, and kills one rank. Where
# the launcher then ends the others, the script prints what a lost rank costs, and the run saves
# every 50 s, unless the line has --save-every.
#
# A host that somebody needs leaves after its step (setup/leave_cn.sh). Who is missing,
# away or lost, is asked again once a minute. Whoever is back is taken back at a step
# boundary when the forecast says that what is left gains more by it than the new start
# costs, by the steps and starts of this very run; else from the next start on. Where all
# hosts are away, or none that is left sees the checkpoints, it waits.
#
# With --polite a host gives way by itself, as with leave_cn.sh, within seconds of
#   somebody at its console: a session at a local seat that logind calls active, not idle
#     and not locked; without logind a text console typed on in the last 5 minutes, or a
#     graphical login. Whoever is there by ssh is at no console
#   a process of another user's that holds memory of one of its GPUs
# and may come back once it has seen nobody for 5 minutes. It is an option of this script,
# for only this one can go on without a host, and take it back. It watches with a small
# process on each host, which ends with this one.
#
# It gives up, and says why, where going on makes no sense: a wrong option, a loss
# that is not finite, or faults again and again without a step in between. Ctrl-C
# ends it at once.
#
# Within an allocation of Slurm's the line may be one of srun, whose nodes are asked through
# Slurm; it needs salloc or sbatch with --no-kill, for a job without it ends with its first node:
#   salloc --no-kill -N 3 bash setup/keep_training.sh srun --mpi=pmix -n 3 ./entry_cn.sh
#
# Options, before the line:
#   --restarts N   faults in a row without progress before it gives up; default 3
#   --polite       hosts give way to others by themselves
#   --dry-run      say which line would be run, and with whom; run nothing
#
# Exit status: that of the last run; 2 nothing was begun.
source "$(dirname -- "${BASH_SOURCE[0]}")/door.sh"
