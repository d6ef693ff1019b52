#!/bin/sh
# Copied by Motley's setup/make_env.sh: mpirun's daemon on another host, started by motley_ssh.
bin=$(dirname -- "$(readlink -f -- "$0")")
prefix=$(dirname -- "$bin")
export PRTE_PREFIX="$prefix" PMIX_PREFIX="$prefix"
export LD_LIBRARY_PATH="$prefix/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
# No shell ends with these by itself: motley_ssh sees by them that the daemon has run.
if "$bin/prted" "$@"; then exit 77; else exit 78; fi
