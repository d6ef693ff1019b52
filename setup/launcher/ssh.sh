#!/usr/bin/env bash
# Copied by Motley's setup/make_env.sh, and run by mpirun in place of ssh (plm_ssh_agent).
#
# mpirun writes the command that starts its daemon in the words of one login shell, its own
# user's here. These words go, so that hosts whose login shells differ (tcsh, bash) all
# understand it. Nobody is there to answer ssh's questions, and a host that is off must not
# cost a minute, nor one that freezes before its ranks are there wait for ever. And where a
# session fails, mpirun does not say whose, and may end with status 0.
bin=$(dirname -- "$(readlink -f -- "$0")")
host='' last='' launcher=$PPID tmp=${TMPDIR:-/tmp}
for word; do
  case $word in
    */bin/prted) word="exec $bin/motley_prted" host=$last ;;
  esac
  last=$word
  set -- "$@" "$word"
  shift
done
# 28 s: Motley names a host that is silent after 15, and mpirun gives up after 30, with status 0.
ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=7 -o ServerAliveCountMax=4 \
  "$@" <&0 &
session=$!
trap 'kill $session; exit 143' TERM
wait $session
status=$?
# A daemon that mpirun has told to end, or that has lost mpirun, ends with less.
[ $status -ge 126 ] || exit $status

# For the launcher reaper of the head's ranks, which then says it, with the step and in run.json.
note=$tmp/motley-$(id -u)/lost.$launcher
mkdir -m 700 "${note%/*}" 2>/dev/null
[ -O "${note%/*}" ] && ! [ -L "${note%/*}" ] && echo "$host $status" >>"$note"
children=$(pgrep -c -P "$launcher") sessions=$(pgrep -c -P "$launcher" -f motley_ssh)
[ "$children" = "$sessions" ] || kill -KILL "$launcher" # there are ranks, and it may say 0
{
  for _ in {1..50}; do kill -0 "$launcher" || break; sleep 0.1; done
  [ "$children" = "$sessions" ] || for _ in {1..60}; do [ -e "$note" ] || exit; sleep 0.1; done
  rm -rf "$note" "$tmp"/ompi*/pid."$launcher" "$tmp/ompi.$launcher"
} 2>/dev/null && echo "motley: $host takes no part: its ssh ended with status $status, for what is" \
  "said above; see all hosts with bash setup/test_cn_connection.sh, or leave it out of hosts.txt" >&2 &
exit $status
