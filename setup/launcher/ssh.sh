#!/bin/sh
# Copied by Motley's setup/make_env.sh, and run by mpirun in place of ssh (plm_ssh_agent).
#
# mpirun writes the command that starts its daemon in the words of one login shell, its own
# user's here. These words go, so that hosts whose login shells differ (tcsh, bash) all
# understand it. Nobody is there to answer ssh's questions, and a host that is off must not
# cost a minute.
bin=$(dirname -- "$(readlink -f -- "$0")")
for word; do
  case $word in
    */bin/prted) word="exec $bin/motley_prted" ;;
  esac
  set -- "$@" "$word"
  shift
done
exec ssh -o BatchMode=yes -o ConnectTimeout=10 "$@"
