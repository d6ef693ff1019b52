#!/usr/bin/env bash
# Write a batch script of Slurm's for a training, and submit it.
#
#   bash setup/slurm_job.sh --nodes 2 --time 4:00:00 ./entry_cn.sh --epochs 90 --run vit
#   bash setup/slurm_job.sh --nodes 2 --time 1:00:00 --submit --requeue ./entry_cn.sh --epochs 5
#   bash setup/slurm_job.sh --nodes 2 --array --submit torch_dist/baseline_measure.py --matrix full
#   bash setup/slurm_job.sh                       # which partitions there are
#
# The line is what srun is to start, from the repository. Partition, cores and GPUs of a
# node and the longest time are asked of sinfo; more than there is, is refused before
# anything waits in a queue. Each GPU gets a rank, or each node of a partition without.
#
# Some minutes before the end of the allocation Slurm tells all ranks, which save after the
# step that they are in. The job then ends; the next one that is submitted with the same
# line, or with --requeue this one itself, goes on from there: no step is lost or done twice.
#
# With --array the line is baseline_measure.py's, and each cell of its matrix is a task of the
# job, with nodes of its own; each task writes the table of what has ended by then. The same
# line again submits what is left. Figures are comparable as far as the nodes are alike.
#
# Options, before the line:
#   --nodes N          default 1
#   --gpus N           of a node; default: all that its nodes have; 0: none
#   --ranks N          of a node without GPUs, default 1
#   --time TIME        as Slurm writes it, 30, 4:00:00 or 1-12; default: the partition's own
#   --partition NAME   default: the cluster's own; --account NAME: who pays
#   --mem, --qos, --constraint, --gres, --exclude   as sbatch takes them
#   --sbatch=OPTION    any other option of sbatch, as in --sbatch=--mail-type=END; may be repeated
#   --run-before CMD   a command before srun, as in --run-before "module load cuda"; may be repeated
#   --before SECONDS   of the end that the ranks are told, default 180
#   --requeue          go on in the same job, until the training has finished
#   --array            a task for each cell of a matrix; --at-once K: no more at a time
#   --container IMAGE  run the ranks in an Apptainer image
#   --mpi KIND         of srun's, default none: the ranks meet by themselves
#   --submit           with sbatch; default: write the script and say how
#   --dry-run          print the script, write nothing; also where there is no Slurm
#
# Exit status: 0 written or submitted, 2 nothing was.
source "$(dirname -- "${BASH_SOURCE[0]}")/door.sh"
