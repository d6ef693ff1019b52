#!/usr/bin/env bash
# Several hosts on this one machine, to try Motley on and to test it with: each has its own
# name, network card, link speed, sshd, disk folders, processor share and memory limit.
#
#   bash lab/lab.sh up                                      # five unequal hosts, 3 s
#   bash lab/lab.sh status                                  # hosts, links, state; account, password
#   bash lab/lab.sh exec ecetesla0 -- ssh -V                # as the lab's user, in their home
#   bash lab/lab.sh exec ecetesla0                          # a login shell there
#   bash lab/lab.sh exec --root ecetesla0 -- pkill sshd     # as root of that host
#   bash lab/lab.sh cut ecetesla3                           # pull its cable; heal undoes
#   bash lab/lab.sh freeze ecetesla1                        # it stops, links stay; thaw undoes
#   bash lab/lab.sh cpus ecetesla1 0.5                      # somebody else's job came; all undoes
#   bash lab/lab.sh kill ecetesla2                          # power off; boot undoes
#   bash lab/lab.sh down                                    # nothing is left
#
# usage: lab.sh up [--profile lab/tesla.toml] | status | down          [--name NAME] [--dry-run]
#        lab.sh exec [--root] HOST [-- COMMAND...]                     [--name NAME]
#        lab.sh cut|heal|freeze|thaw|kill|boot HOST                    [--name NAME] [--dry-run]
#        lab.sh cpus HOST NUMBER|all                                   [--name NAME] [--dry-run]
#
# --name keeps several labs apart (default: lab); --dry-run prints every change and does
# none. Profiles: lab/tesla.toml, lab/equal.toml, lab/private.toml; the first says what each
# key means. The first host of a profile is the head: type mpirun there.
#
# Needs root, Python >= 3.11, iproute2, openssh-server, util-linux, procps, passwd and the
# profile's login shells. Nothing of the machine's own network, accounts or mounts is
# changed: all of a lab is its processes, its cgroups and one folder,
# /var/lib/motley-lab/NAME.
#
# Variables: MOTLEY_VENV (default: .venv in the repository), which the hosts can reach too.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
case ${1:-} in
  '' | -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
esac

export MOTLEY_VENV=${MOTLEY_VENV:-$root/.venv}
for python in "$MOTLEY_VENV/bin/python" python3 /usr/bin/python3; do
  if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    export PYTHONPATH=$root/src PYTHONDONTWRITEBYTECODE=1
    exec "$python" "$root/lab/lab.py" "$@"
  fi
done
echo "motley: no Python >= 3.11 here; make the environment with: bash $root/setup/make_env.sh" >&2
exit 2
