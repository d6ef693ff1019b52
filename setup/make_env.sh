#!/usr/bin/env bash
# Make this machine's environment, .venv in the repository; no root needed.
#
#   bash setup/make_env.sh              # what training needs: 6 GB of disk, about a minute
#   bash setup/make_env.sh --dev        # and what the tests need
#   bash setup/make_env.sh --dry-run    # print what would be done
#
# An environment that is current is reused; one that was cut short is completed. uv installs,
# from where pip is configured to (pip.conf, PIP_ variables), and from its wheel, which pip
# puts beside the packages; where that cannot be had, pip installs, which is said. On the other
# machines of a lab, setup/install_cn.sh runs this script, with
#
#   --python-archive FILE   a standalone Python (see get_python.sh) in place of the network's,
#                           for a machine without Python >= 3.11
#   --own-python            a standalone Python even where the machine's would do: for a folder
#                           that machines with other Pythons share
#   --lock FILE             exactly these versions, as another environment's requirements.lock
#   --wheels FOLDER         from these wheels alone, without a network
#   --torch BUILD           torch from download.pytorch.org/whl/BUILD: cu126, cu128, cpu ...
#
#   --pip                   pip installs in any case
#
# Variables: MOTLEY_VENV (default: .venv beside README.md), PYTHON (default: the newest
# Python >= 3.11 here that every user can run; else a standalone one in .venv-python).
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
launcher=$root/setup/launcher
install=("$root/setup/install_packages.py")
venv=${MOTLEY_VENV:-$root/.venv}
wanted=("$root/requirements.txt")
dry_run=false own=false archive='' wheels='' torch='' lock=''

case $root in
  *[:,]*)
    echo "motley: the folder $root has a ':' or ',' in its name, which separate folders in PYTHONPATH" \
      "and in MPI's options; give it another name" >&2
    exit 2 ;;
esac
unset PYTHONHOME PYTHONPATH PYTHONPLATLIBDIR PYTHONOPTIMIZE PYTHONSAFEPATH # of another Python

while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) sed -n '2,/^set /{/^set /d; s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit 0 ;;
    --dev) wanted+=("$root/requirements-dev.txt") ;;
    --dry-run) dry_run=true ;;
    --python-archive) archive=$(realpath -e -- "${2:?--python-archive needs a file}"); shift ;;
    --own-python) own=true ;;
    --pip) install+=(--pip) ;;
    --lock) lock=$(realpath -e -- "${2:?--lock needs a file}"); install+=(--lock "$lock"); shift ;;
    --wheels) wheels=$(realpath -e -- "${2:?--wheels needs a folder}"); install+=(--wheels "$wheels"); shift ;;
    --torch) torch=${2:?--torch needs a build, such as cu126}; install+=(--torch "$torch"); shift ;;
    *) echo "motley: unknown option $1; see make_env.sh -h" >&2; exit 2 ;;
  esac
  shift
done

# Every change passes here.
change() {
  if $dry_run; then echo "would run: $*"; else "$@"; fi
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

find_python() { # PYTHON alone, if set
  local name found any=
  for name in ${PYTHON:-python3.14 python3.13 python3.12 python3.11 python3 /usr/bin/python3}; do
    found=$(command -v "$name") || continue
    usable "$found" || continue
    # An environment made from a Python in somebody's closed home is of no use to others.
    if [ -n "${PYTHON:-}" ] || shared "$found"; then echo "$found"; return; fi
    any=${any:-$found}
  done
  [ -n "$any" ] && echo "$any"
}

say_instead() { # TOPIC TEXT: of Open MPI's own words
  local words="$venv/share/prte/help-prun.txt"
  [ ! -f "$words" ] || sed -i -e "/^\\[prun:$1\\]$/,/^\\[/{/^\\[/!d}" \
    -e "s/^\\[prun:$1\\]$/&\\n\\n$2\\n/" "$words"
}

settle_mpi() {
  install -m 755 "$launcher/mpirun.sh" "$venv/bin/mpirun"
  install -m 755 "$launcher/ssh.sh" "$venv/bin/motley_ssh"
  install -m 755 "$launcher/prted.sh" "$venv/bin/motley_prted"
  # Open MPI 5 binds ranks to cores and refuses more ranks than cores; a lab's ranks are
  # one a GPU, and a laptop tries five on two cores. Up to 64 hosts the head starts all others
  # itself: they need no keys. A link that is cut is noticed in 20 to 30 s in place of 8 minutes:
  # mpirun then ends with status 0, so Motley's supervisor, which names the host, must come first.
  local line
  # Lines of an earlier version, or of where this environment was before.
  sed -i -e '/^oob_tcp_keepalive_/d' -e '/^plm_ssh_agent/d' "$venv/etc/prte-mca-params.conf"
  for line in 'hwloc_default_binding_policy = none' "plm_ssh_agent = $venv/bin/motley_ssh" \
    'oob_tcp_keepalive_time = 10' 'oob_tcp_keepalive_intvl = 5' 'oob_tcp_keepalive_probes = 4'; do
    grep -qxF "$line" "$venv/etc/prte-mca-params.conf" || echo "$line" >>"$venv/etc/prte-mca-params.conf"
  done
  # What mpirun says after a rank that failed has the last word on a terminal: it points to ours.
  local ours='Why is in the line above that begins with "motley:".'
  say_instead non-zero-exit "%s: all ranks were ended, because %s ended with status %d.\\n$ours"
  say_instead proc-exit-no-sync "%s: rank %lu, process %lu on %s, left before all ended.\\n$ours"
}

# What the environment was made for, a line each; one with the tests' packages, or with
# versions or a torch that were asked for, serves plain training too.
hash_of() { cat "$@" | sha256sum | cut -d ' ' -f 1; }
made_for() {
  echo "$root $(hash_of "$root/requirements.txt" "${BASH_SOURCE[0]}" "${install[0]}" "$launcher"/*.sh)"
  [ ${#wanted[@]} -eq 1 ] || echo "dev $(hash_of "${wanted[@]}")"
  [ -z "$torch" ] || echo "torch $torch"
  [ -z "$lock" ] || echo "lock $(hash_of "$lock")"
}
is_current() {
  [ -x "$venv/bin/python" ] && [ -f "$venv/motley-stamp" ] || return 1
  local line
  while read -r line; do grep -qxF "$line" "$venv/motley-stamp" || return 1; done < <(made_for)
}

# The lab's hosts are the user's to write; git tracks the example alone.
if ! [ -e "$root/hosts.txt" ] && [ -f "$root/hosts.example.txt" ] && [ -w "$root" ]; then
  change cp -- "$root/hosts.example.txt" "$root/hosts.txt"
fi

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
  free=$(df -Pk "$(dirname "$venv")" | awk 'NR == 2 { print int($4 / 1048576) }')
  if [ "$free" -lt 8 ] && [ -z "$wheels" ]; then
    echo "motley: $free GB are free where $venv goes, and it takes 8 while it is made; free some," \
      "or choose another place: MOTLEY_VENV=/path bash setup/make_env.sh" >&2
    exit 2
  fi
  if $own || ! python=$(find_python); then
    $own || echo "environment: no Python >= 3.11 with venv and ensurepip on $(uname -n)"
    version=$(grep -oE '3\.[0-9]+' <<<"${PYTHON:-}" | head -n 1) || true
    change bash "$root/setup/get_python.sh" "$venv-python" ${version:+--version "$version"} \
      ${archive:+--archive "$archive"}
    python=$venv-python/bin/python3
  fi
  echo "environment: making $venv with $python ($("$python" -V 2>&1 || true))"
  change "$python" -m venv --clear "$venv"
fi

echo "environment: installing $(basename -a "${lock:-${wanted[@]}}" | xargs) (6 GB, about a minute)"
if $dry_run; then
  change python "${install[@]}" "${wanted[@]}"
  exit 0
fi
rm -f "$venv/motley-stamp"
"$venv/bin/python" "${install[@]}" "${wanted[@]}"
settle_mpi
"$venv/bin/python" -m pip freeze --disable-pip-version-check --all --exclude pip --exclude-editable >"$venv/requirements.lock"
made_for >"$venv/motley-stamp"
echo "environment: ready; its exact versions are in $venv/requirements.lock"
