# shellcheck shell=bash
# Sourced by setup's scripts: prints the caller's own -h, then becomes the Python of the same
# name in this machine's environment.
set -euo pipefail

door=${BASH_SOURCE[1]}
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
for argument in "$@"; do
  case $argument in
    -h | --help) sed -n '2,/^source /{/^source /d; s/^# \{0,1\}//p}' "$door"; exit 0 ;;
  esac
done
export MOTLEY_VENV=${MOTLEY_VENV:-$root/.venv}
if ! [ -x "$MOTLEY_VENV/bin/python" ]; then
  echo "motley: no environment at $MOTLEY_VENV; make it with: bash $root/setup/make_env.sh" >&2
  exit 2
fi
export PATH=$MOTLEY_VENV/bin:$PATH PYTHONPATH=$root/src PYTHONUNBUFFERED=1
exec "$MOTLEY_VENV/bin/python" "${door%.sh}.py" "$@"
