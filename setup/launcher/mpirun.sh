#!/bin/sh
# Copied by Motley's setup/make_env.sh: as mpiexec beside it, but root, which is all that a
# container has, may use it too.
if [ "$(id -u)" = 0 ]; then
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
exec "$(dirname -- "$(readlink -f -- "$0")")/mpiexec" "$@"
