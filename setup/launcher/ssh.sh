#!/usr/bin/env bash
# Copied by Motley's setup/make_env.sh, and run by mpirun in place of ssh (plm_ssh_agent).
#
# mpirun writes the command that starts its daemon in the words of one login shell, its own
# user's here. These words go, so that hosts whose login shells differ (tcsh, bash) all
# understand it. Nobody is there to answer ssh's questions, and a host that is off must not
# cost a minute. Where ssh fails, mpirun guesses why, at length, and names nobody: a process
# beside it says whose it was, after mpirun's words; once ssh has connected, it ends that one.
# mpirun takes status 0 for a daemon that lives on, and waits for it without end: also where the
# login shell has ended before the daemon (exit 0 in .bashrc). So it does where the shell never
# comes to the daemon (read in .bashrc): the command prints a mark first, and has a minute for it.
bin=$(dirname -- "$(readlink -f -- "$0")")
launcher=$PPID
mark=motley_reached_its_command
shell_s=${MOTLEY_LOGIN_TIMEOUT:-60} # seconds to connect and for the login shell's own files

wait_for() { # PROCESS TENTHS: whether it ends within these tenths of a second
  local n
  for ((n = 0; n < $2; n++)); do
    kill -0 "$1" 2>/dev/null || return 0
    sleep 0.1
  done
  return 1
}

say_last() { # HOST WHY FIX: once mpirun has had its words
  exec >/dev/null # or who reads this would wait for its end
  wait_for "$launcher" 50
  echo "motley: $1 takes no part: $2; $3" >&2
}

relay() { # PROCESS: what ssh prints, without the mark; tells the process where that is late
  local line left end=$((SECONDS + shell_s)) code=0
  while left=$((end - SECONDS)) && IFS= read -r -t "$((left > 0 ? left : 1))" line || code=$?; do
    if [ "$line" = "$mark" ]; then exec cat; fi
    if ((code > 128)); then kill -USR1 "$1"; exec cat; fi
    if ((code)); then printf %s "$line"; return; fi
    printf '%s\n' "$line"
  done
}

run_session() { # HOST COMMAND...: ssh, and what its status means
  local host=$1 session code=0 is_late=false
  shift
  trap 'is_late=true; kill "$session" 2>/dev/null' USR1
  "$@" <&0 > >(relay $$) &
  session=$!
  # mpirun kills this process where it has lost a host: then ssh, which holds its output, must go.
  exec 8> >(exec >/dev/null 2>&1; read -r _ || kill "$session")
  # shellcheck disable=SC2064
  trap "kill $session 2>/dev/null" TERM INT HUP
  while wait "$session" || code=$?; kill -0 "$session" 2>/dev/null; do code=0; done
  echo ended >&8
  if $is_late; then
    say_last "$host" "its login shell did not reach mpirun's daemon within $shell_s s" \
      "find what waits, such as a read or a lost mount, in ~/.bashrc (tcsh: ~/.tcshrc, zsh: ~/.zshenv) and in the files that it reads; or allow it more seconds: export MOTLEY_LOGIN_TIMEOUT=300" &
    exit 1
  fi
  case $code in
    77) exit 0 ;;
    78 | 255) exit "$code" ;;
    126 | 127)
      say_last "$host" "it cannot start $bin/motley_prted (status $code)" \
        "make its environment with: bash setup/install_cn.sh" &
      exit "$code" ;;
  esac
  ((code < 128)) || exit "$code" # by a signal, such as mpirun sends
  say_last "$host" "its login shell ended with status $code before mpirun's daemon began" \
    "look for 'exit' in ~/.bashrc there (tcsh: ~/.tcshrc, zsh: ~/.zshenv) and in the files that it reads. This command prints hello once that is corrected: ssh -- $host echo hello" &
  exit 1
}

if [ "${1:-}" = --session ]; then run_session "${@:2}"; fi

# A connection that others share would run no command of ours.
ssh=(ssh -o BatchMode=yes -o ConnectTimeout=10 -o ControlPath=none)
to=() words=()
for word; do
  case $word in
    */bin/prted) to=("${words[@]}") word="echo $mark; exec $bin/motley_prted" ;; # before it: options, host
  esac
  words+=("$word")
done

why='ssh did not reach it, for the reason above'
case ${to[*]: -1} in
  -*) # to ssh an option, which may write a file, or run a command
    ssh=(false) why="a host's name cannot begin with '-'" ;;
esac

say_failure() {
  exec >/dev/null
  local began=$SECONDS
  wait_for $$ 600 || exit
  # Unless it took its time, it may be mpirun that has ended it, for another host.
  ((SECONDS - began < 9)) && "${ssh[@]}" -n "${to[@]}" true 2>/dev/null && exit
  say_last "${to[-1]}" "$why" "see all hosts with bash setup/test_cn_connection.sh, or remove it from hosts.txt"
}

watch=$(say_failure & echo $!)
# The command line of this process is from here on that of the session: ranks read the host in it.
exec bash "$0" --session "${to[-1]}" "${ssh[@]}" -o PermitLocalCommand=yes \
  -o "LocalCommand=kill $watch" "${words[@]}"
