#!/usr/bin/env bash
# Make this machine's environment, .venv in the repository; no root needed.
#
#   bash setup/make_env.sh              # what training needs: 6 GB of disk, about 2 minutes
#   bash setup/make_env.sh --dev        # and what the tests need
#   bash setup/make_env.sh --dry-run    # print what would be done
#
# An environment that is current is reused; one that was cut short is completed.
#
# Variables: MOTLEY_VENV (default: .venv beside README.md), PYTHON (default: the newest
# Python >= 3.11 here that every user can run).
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
venv=${MOTLEY_VENV:-$root/.venv}
wanted=("$root/requirements.txt")
dry_run=false

for argument in "$@"; do
  case $argument in
    -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    --dev) wanted+=("$root/requirements-dev.txt") ;;
    --dry-run) dry_run=true ;;
    *) echo "motley: unknown option $argument; see make_env.sh -h" >&2; exit 2 ;;
  esac
done

# Every change passes here.
change() {
  if $dry_run; then echo "would run: $*"; else "$@"; fi
}

# A long command with its output in a file, and a dot every 5 s to show that it lives.
patiently() {
  local log=$1; shift
  "$@" >"$log" 2>&1 &
  local pid=$! waited=0
  while kill -0 "$pid" 2>/dev/null; do
    sleep 1
    waited=$((waited + 1))
    [ $((waited % 5)) -ne 0 ] || printf .
  done
  echo
  if ! wait "$pid"; then
    tail -n 20 "$log" >&2
    echo "motley: that failed; all of its output is in $log" >&2
    return 1
  fi
}

usable() { # can make environments, and is new enough
  "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

shared() { # no folder on the way to it is closed to other users
  local path
  path=$("$1" -c 'import os, sys; print(os.path.realpath(sys.executable))')
  while [ "$path" != / ]; do
    [ $((0$(stat -c %a "$path") % 2)) -eq 1 ] || return 1
    path=$(dirname "$path")
  done
}

find_python() {
  local name found any=
  for name in "${PYTHON:-}" python3.14 python3.13 python3.12 python3.11 python3 /usr/bin/python3; do
    found=$(command -v "${name:-no such}") || continue
    usable "$found" || continue
    # An environment made from a Python in somebody's closed home is of no use to others.
    if [ "$name" = "${PYTHON:-}" ] || shared "$found"; then echo "$found"; return; fi
    any=${any:-$found}
  done
  [ -n "$any" ] && echo "$any"
}

settle_mpi() {
  # Open MPI 5 binds ranks to cores and refuses more ranks than cores; a lab's ranks are
  # one a GPU, and a laptop tries five on two cores.
  local line='hwloc_default_binding_policy = none'
  grep -qxF "$line" "$venv/etc/prte-mca-params.conf" || echo "$line" >>"$venv/etc/prte-mca-params.conf"
  # Open MPI refuses root unless told twice. Containers are root, and the plain mpirun
  # line should work there too.
  cat >"$venv/bin/mpirun" <<'WRAPPER'
#!/bin/sh
# Written by Motley's setup/make_env.sh: as mpiexec beside it, but root may use it too.
if [ "$(id -u)" = 0 ]; then
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
exec "$(dirname -- "$(readlink -f -- "$0")")/mpiexec" "$@"
WRAPPER
  chmod +x "$venv/bin/mpirun"
}

install() {
  "$venv/bin/python" -m pip install --disable-pip-version-check --upgrade pip setuptools wheel
  local file
  for file in "${wanted[@]}"; do
    "$venv/bin/python" -m pip install --disable-pip-version-check -r "$file"
  done
  "$venv/bin/python" -m pip install --disable-pip-version-check --no-deps --no-build-isolation \
    -e "$root"
}

# What the environment was made for; one with the tests' packages serves training too.
stamp_of() { cat "$@" | sha256sum | cut -d ' ' -f 1; }
is_current() {
  [ -x "$venv/bin/python" ] && [ -f "$venv/motley-stamp" ] || return 1
  local stamp
  stamp=$(stamp_of "${wanted[@]}" "${BASH_SOURCE[0]}")
  grep -qxF "$root $stamp" "$venv/motley-stamp"
}

if is_current; then
  echo "environment: $venv is current"
  exit 0
fi

if ! $dry_run; then
  # Two at once would install over each other.
  exec 9>"$root/.venv.lock"
  flock -n 9 || { echo "environment: waiting for another make_env.sh"; flock 9; }
  if is_current; then echo "environment: $venv is current"; exit 0; fi
fi

if ! [ -x "$venv/bin/python" ] || ! "$venv/bin/python" -c '' 2>/dev/null; then
  if ! python=$(find_python); then
    echo "motley: no Python >= 3.11 with venv and ensurepip on $(uname -n); install one (Debian:" \
      "apt-get install python3-venv), or name one: PYTHON=/path/to/python3 bash setup/make_env.sh" >&2
    exit 2
  fi
  free=$(df -Pk "$(dirname "$venv")" | awk 'NR == 2 { print int($4 / 1048576) }')
  if [ "$free" -lt 8 ]; then
    echo "motley: $free GB are free where $venv goes, and it takes 8 while it is made; free some," \
      "or choose another place: MOTLEY_VENV=/path bash setup/make_env.sh" >&2
    exit 2
  fi
  echo "environment: making $venv with $python ($("$python" -V))"
  change "$python" -m venv --clear "$venv"
fi

printf 'environment: installing %s (6 GB, about 2 minutes) ' "$(basename -a "${wanted[@]}" | xargs)"
if $dry_run; then
  echo
  change pip install -r "${wanted[@]}"
  exit 0
fi
rm -f "$venv/motley-stamp"
patiently "$venv/install.log" install
settle_mpi
"$venv/bin/python" -m pip freeze --disable-pip-version-check --exclude-editable >"$venv/requirements.lock"
{
  echo "$root $(stamp_of "$root/requirements.txt" "${BASH_SOURCE[0]}")"
  [ ${#wanted[@]} -eq 1 ] || echo "$root $(stamp_of "${wanted[@]}" "${BASH_SOURCE[0]}")"
} >"$venv/motley-stamp"
echo "environment: ready; its exact versions are in $venv/requirements.lock"
