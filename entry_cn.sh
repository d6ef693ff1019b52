#!/usr/bin/env bash
# The door of every rank: sets its environment, then becomes Python.
#
#   mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh
#   mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh torch_dist/train_vit.py --epochs 5 --lr 1e-3
#   mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh deepspeed/train_vit.py
#   srun --mpi=pmix -n 5 ./entry_cn.sh                  # under Slurm; --mpi=none does too
#   torchrun --nproc-per-node 2 --no-python -- ./entry_cn.sh --epochs 5
#   ./entry_cn.sh                                       # one process
#   ./entry_cn.sh torch_dist/train_vit.py -h            # lists the options of a training
#
# usage: ./entry_cn.sh [SCRIPT.py] [ARGS...]            default: torch_dist/train_vit.py
#
# Variables, each left alone when you set it: MOTLEY_VENV (default: .venv beside this
# file), OMP_NUM_THREADS (cores of this machine / its ranks), GOMP_SPINCOUNT (default 10000),
# TORCH_CPP_LOG_LEVEL (default: ERROR), MOTLEY_START_TIMEOUT (seconds in which all ranks should
# have started, default 120; 0: however long it takes), MOTLEY_SECRET (what ranks without MPI know
# each other by; default: ~/.motley/secret, made once), and those of .deepspeed_env beside this
# file and in your home, one NAME=VALUE a line, which DeepSpeed reads too (DS_ENV_FILE: another
# name, or a whole path). Folders of your PYTHONPATH come after the environment's own packages.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
say() { echo "motley: $*" >&2; }
case $root in
  *[:,]*)
    say "the folder $root on $(uname -n) has a ':' or ',' in its name, which separate folders in" \
      "PYTHONPATH and in MPI's options; give it another name"
    exit 2 ;;
esac
case ${1:-} in
  -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
esac
script=$root/torch_dist/train_vit.py
case ${1:-} in
  '' | -*) ;; # no script named: options, if any, are for the default one
  *) script=$1; shift ;;
esac
# A script may be named from anywhere, as the README names it from the root.
[ -e "$script" ] || script=$root/$script
if ! [ -f "$script" ]; then
  say "no script $script on $(uname -n); name one under $root, as in torch_dist/train_vit.py"
  exit 2
fi

venv=${MOTLEY_VENV:-$root/.venv}
python=$venv/bin/python
if ! [ -x "$python" ]; then
  make="bash $root/setup/make_env.sh"
  if [ -n "${MOTLEY_VENV:-}" ]; then
    why=", where MOTLEY_VENV says it is; make it there with: MOTLEY_VENV=$venv $make"
  else
    why="; make it there with: $make; or name one that is elsewhere: mpirun -x MOTLEY_VENV=/its/path"
  fi
  say "no environment at $venv on $(uname -n)$why"
  exit 2
fi

# motley.launch.environment sets the rank's variables and becomes Python again: the rank has to be the
# launcher's direct child. -E: what the user's PYTHON variables say is for that module to sort out.
begin='import sys; sys.path.insert(0, sys.argv.pop(1)); from motley.cli import main; main()'
exec "$python" -E -P ${PYTHONDONTWRITEBYTECODE:+-B} -c "$begin" "$root/src" run "$script" "$@"
