#!/usr/bin/env bash
# From a fresh machine to all tests passed.
#
#   bash tests/run.sh                       # lint, types, the tests whose turn it is: 16 to 30 minutes
#   bash tests/run.sh --turn all            # every variant of every test, before a release: 45
#   bash tests/run.sh -m "not mpi"          # the unit tests: 1.5 to 2.5 minutes
#   bash tests/run.sh -k resume             # options go to pytest
#
# Variants of one promise take turns: a fifth at a commit, all within five (tests/support/turns.py).
#
# Makes the environment if need be. As root it also installs the system packages that some
# tests try Motley against (Debian's Open MPI, Slurm, Chromium) or need (the lab in a box); without
# root those tests are skipped with a line that says so. With CI=true nothing may be skipped.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
case ${1:-} in
  -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
esac

cd "$root"
bash setup/make_env.sh --dev
bin=${MOTLEY_VENV:-$root/.venv}/bin

packages=()
command -v mpirun.openmpi >/dev/null || packages+=(openmpi-bin libopenmpi-dev)
command -v slurmctld >/dev/null || packages+=(slurm-wlm libpmix-dev)
command -v munged >/dev/null || packages+=(munge)
command -v tc >/dev/null || packages+=(iproute2)
command -v sshd >/dev/null || packages+=(openssh-server)
command -v tcsh >/dev/null || packages+=(tcsh)
command -v chromium >/dev/null || packages+=(chromium)
if [ ${#packages[@]} -gt 0 ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "tests: installing ${packages[*]}"
  log=$(mktemp)
  if ! { apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
    apt-get install -qq -y --no-install-recommends "${packages[@]}"; } >"$log" 2>&1; then
    tail -n 5 "$log"
    echo "tests: could not install ${packages[*]}; tests that need them are skipped"
  fi
  rm -f "$log"
fi

echo "tests: shellcheck, ruff, mypy"
mapfile -t scripts < <(git ls-files '*.sh' .ci/run .githooks)
"$bin/shellcheck" "${scripts[@]}"
"$bin/ruff" check .
"$bin/ruff" format --check .
types=$(mktemp)
nice "$bin/mypy" >"$types" 2>&1 & # half a minute of one core in a new clone, beside the tests
mypy=$!
trap 'kill "$mypy" 2>/dev/null || true; rm -f "$types"' EXIT

# Bytecode is made once, not by each worker, each rank and each user of a lab, who may not write it.
export PYTHONDONTWRITEBYTECODE=
"$bin/python" -m compileall -q src
# Four on two cores: labs wait for most of their time. What only computes needs no more than three.
workers=4
case " $* " in *" not mpi "*) workers=3 ;; esac
code=0
"$bin/python" -m pytest --numprocesses "$workers" "$@" || code=$?
wait "$mypy" || code=1
echo "mypy: $(cat "$types")"
exit "$code"
