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

trim() { # TEXT without blanks, and the CR of a Windows editor, around it: becomes $trimmed
  trimmed=${1#"${1%%[![:space:]]*}"}
  trimmed=${trimmed%"${trimmed##*[![:space:]]}"}
}
read_settings() { # FILE of NAME=VALUE lines, blank lines and comments
  [ -f "$1" ] || return 0
  local line name value trimmed
  local quoted='^("[^"]*"|'"'[^']*'"')([[:space:]]+#.*)?$'
  while IFS= read -r line || [ -n "$line" ]; do
    trim "${line#$'\xef\xbb\xbf'}"
    line=$trimmed
    case $line in '' | '#'*) continue ;; esac
    trim "${line%%=*}"
    name=${trimmed##export[[:space:]]}
    if ! [[ $line == *=* && $name =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]]; then
      say "$1 on $(uname -n) has the line '$line'; write NAME=VALUE"
      exit 2
    fi
    trim "${line#*=}"
    value=$trimmed
    if [[ $value =~ $quoted ]]; then
      value=${BASH_REMATCH[1]:1:-1}
    else
      trim "${value%%[[:space:]]#*}"
      value=$trimmed
      case $value in '#'*) value= ;; esac
    fi
    [ -n "${!name+set}" ] || export "$name=$value"
  done <"$1"
}
settings=${DS_ENV_FILE:-.deepspeed_env}
case $settings in
  /*)
    if ! [ -f "$settings" ]; then
      say "DS_ENV_FILE is $settings, and there is no such file on $(uname -n); put it there, or unset" \
        "DS_ENV_FILE"
      exit 2
    fi
    read_settings "$settings" ;;
  *)
    read_settings "$root/$settings"
    [ -z "${HOME:-}" ] || read_settings "$HOME/$settings" ;;
esac

first_here() { # Whether this is the rank that speaks for its machine.
  [ "${OMPI_COMM_WORLD_LOCAL_RANK:-${SLURM_LOCALID:-${LOCAL_RANK:-${MPI_LOCALRANKID:-0}}}}" = 0 ]
}
# Another Python's variables, such as a module or .bashrc sets, would break this one's start.
for name in PYTHONHOME PYTHONPLATLIBDIR PYTHONOPTIMIZE PYTHONSAFEPATH PYTHONINSPECT; do
  [ -n "${!name+set}" ] || continue
  if first_here; then
    say "$name=${!name} on $(uname -n) is left out: the environment has a Python of its own; find" \
      "what sets it with: grep -n $name ~/.bashrc ~/.profile /etc/profile.d/*"
  fi
  unset "$name"
done
# A shell that srun --pty has started has the variables of a rank, and so has all that runs in it.
if [ -n "${SLURM_PTY_PORT:-}" ] && [ -z "${OMPI_COMM_WORLD_RANK:-}${ROLE_RANK:-}" ] &&
  [ "$(cat "/proc/$PPID/comm" 2>/dev/null)" != slurmstepd ]; then
  for name in "${!SLURM_STEP@}" "${!SLURM_PROCID@}" "${!SLURM_LOCALID@}" "${!PMI@}"; do
    unset "$name"
  done
  say "this shell is one of srun --pty, so this is a process of its own; for several ranks put" \
    "mpirun -np N before it, or start it with srun --mpi=none from outside of that shell"
fi

# For how long a thread spins for the others before it sleeps. With OpenMP's own 300000, some
# milliseconds, a rank beside other jobs spends its turns on the processor on waiting.
[ -n "${OMP_WAIT_POLICY:-}" ] || export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-10000}
export PATH=$venv/bin:$PATH
# Packages of another Python would come before the environment's: Python adds these folders last.
export MOTLEY_LAST_FOLDERS=${MOTLEY_LAST_FOLDERS:-${PYTHONPATH:-}}
export PYTHONPATH=$root/src
export PYTHONUNBUFFERED=1
# Its warnings are of hosts without a name in DNS and the like; errors are still said.
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}

# exec, so that the rank is the launcher's direct child: it asks the kernel to die with
# its parent (motley.launch.process), which works for a direct child alone. -P: a folder named motley
# where the user stands is not the package.
exec "$python" -P -m motley.launch "$script" "$@"
