# shellcheck shell=bash
# Sourced by setup's scripts: becomes the module of the caller's name in motley.provision, by the
# Python of this machine's environment. Without that it prints the -h, the module's docstring.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
name=$(basename -- "${BASH_SOURCE[1]}" .sh)
for argument in "$@"; do
  case $argument in
    -h | --help) sed '1s/^"""//; /^"""$/,$d' "$root/src/motley/provision/$name.py"; exit 0 ;;
  esac
done
case $root in
  *[:,]*)
    echo "motley: the folder $root has a ':' or ',' in its name, which separate folders in PYTHONPATH" \
      "and in MPI's options; give it another name" >&2
    exit 2 ;;
esac
make="bash $root/setup/make_env.sh"
if [ -n "${MOTLEY_VENV:-}" ]; then
  why=", where MOTLEY_VENV says it is; make it with: MOTLEY_VENV=$MOTLEY_VENV $make"
else
  why="; make it with: $make; or name one that is elsewhere: export MOTLEY_VENV=/its/path"
fi
export MOTLEY_VENV=${MOTLEY_VENV:-$root/.venv}
if ! [ -x "$MOTLEY_VENV/bin/python" ]; then
  echo "motley: no environment at $MOTLEY_VENV$why" >&2
  exit 2
fi
unset PYTHONHOME PYTHONPLATLIBDIR PYTHONOPTIMIZE PYTHONSAFEPATH # of another Python
export PATH=$MOTLEY_VENV/bin:$PATH PYTHONPATH=$root/src PYTHONUNBUFFERED=1
# -P: a module in the folder where this is typed is not meant.
exec "$MOTLEY_VENV/bin/python" -P -m "motley.provision.$name" "$@"
