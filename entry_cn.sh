#!/usr/bin/env bash
# The door of every rank: sets its environment, then becomes Python.
#
#   mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh
#   mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh torch_dist/train_vit.py --epochs 5 --lr 1e-3
#   mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh deepspeed/train_vit.py
#   srun --mpi=pmix -n 5 ./entry_cn.sh                  # under Slurm; --mpi=none does too
#   torchrun --nproc-per-node 2 --no-python -- ./entry_cn.sh --epochs 5
#   ./entry_cn.sh                                       # one process
#
# usage: ./entry_cn.sh [SCRIPT.py] [ARGS...]            default: torch_dist/train_vit.py
#
# Variables, each left alone when you set it: MOTLEY_VENV (default: .venv beside this
# file), OMP_NUM_THREADS (cores of this machine / its ranks), GOMP_SPINCOUNT (default 10000),
# TORCH_CPP_LOG_LEVEL (default: ERROR), MOTLEY_START_TIMEOUT (seconds in which all ranks should
# have started, default 120; 0: however long it takes), MOTLEY_SECRET (what ranks without MPI know
# each other by; default: ~/.motley/secret, made once), and those of .deepspeed_env beside this
# file and in your home, one NAME=VALUE a line, which DeepSpeed reads too.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
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
  echo "motley: no script $script on $(uname -n); name one under $root, as in torch_dist/train_vit.py" >&2
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
  echo "motley: no environment at $venv on $(uname -n)$why" >&2
  exit 2
fi

read_settings() { # FILE of NAME=VALUE lines, blank lines and comments
  [ -f "$1" ] || return 0
  local line name value
  while IFS= read -r line || [ -n "$line" ]; do
    line=${line#"${line%%[![:space:]]*}"}
    case $line in '' | '#'*) continue ;; esac
    name=${line%%=*} value=${line#*=}
    if ! [[ $line == *=* && $name =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]]; then
      echo "motley: $1 on $(uname -n) has the line '$line'; write NAME=VALUE" >&2
      exit 2
    fi
    case $value in \"*\" | \'*\') value=${value:1:-1} ;; esac
    [ -n "${!name+set}" ] || export "$name=$value"
  done <"$1"
}
settings=${DS_ENV_FILE:-.deepspeed_env}
read_settings "$root/$settings"
[ -z "${HOME:-}" ] || read_settings "$HOME/$settings"

ranks_here=${OMPI_COMM_WORLD_LOCAL_SIZE:-${LOCAL_WORLD_SIZE:-${SLURM_STEP_TASKS_PER_NODE:-1}}}
ranks_here=${ranks_here%%[!0-9]*} # Slurm writes 3(x2) for three on each of two nodes
# Open MPI's own default is to bind a rank to one core, or to one socket's; its loader processes are
# bound with it. The environment's configuration turns that off.
cores_of() { sed -n 's/^Cpus_allowed_list:[[:space:]]*//p' "/proc/$1/status" 2>/dev/null || true; }
if [ "${OMPI_COMM_WORLD_LOCAL_RANK:-}" = 0 ] && [ "$(cores_of self)" != "$(cores_of $PPID)" ]; then
  cores=$(env -u OMP_NUM_THREADS nproc) all=$(nproc --all) # nproc obeys the variable
  [ $((cores * ranks_here)) -ge "$all" ] ||
    echo "motley: mpirun binds each rank on $(uname -n) to $cores of $all cores, and its loader" \
      "processes with it; mpirun --bind-to none gives them all" >&2
fi
threads=$(($(nproc) / ranks_here))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
# For how long a thread spins for the others before it sleeps. With OpenMP's own 300000, some
# milliseconds, a rank beside other jobs spends its turns on the processor on waiting.
[ -n "${OMP_WAIT_POLICY:-}" ] || export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-10000}
export PATH=$venv/bin:$PATH
export PYTHONPATH=$root/src${PYTHONPATH:+:$PYTHONPATH}
export PYTHONUNBUFFERED=1
# Its warnings are of hosts without a name in DNS and the like; errors are still said.
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}

# exec, so that the rank is the launcher's direct child: it asks the kernel to die with
# its parent (motley.launch.process), which works for a direct child alone.
exec "$python" -m motley.launch "$script" "$@"
