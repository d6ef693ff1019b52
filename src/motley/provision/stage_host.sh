# shellcheck shell=sh
# Not for you to run: stage_copy.py sends it to a host, to look at, hash, write or finish the copy
# of one file. POSIX sh and GNU's coreutils; nothing is changed but $folder, NAME and its part.
#
#   $1 what to do   $2 folder   $3 NAME   $4 the host's name   $5 bytes of a block
#   $6 bytes of the file   $7... blocks to write, as FIRST-LAST, which come by stdin

what=$1 folder=$2 whole=$2/$3 part=$2/.$3.$4.part block=$5 size=$6

bytes() { stat -c %s -- "$1"; }
hash_of() { # hash_of FILE NUMBER: of one block, after its number
  printf '%s %s\n' "$2" "$(dd if="$1" bs="$block" skip="$2" count=1 2>/dev/null |
    sha256sum | cut -c 1-64)"
}
mine() { [ "$(stat -c %u -- "$1")" = "$(id -u)" ]; }
ours() { # a file that may be replaced, or none
  ! [ -L "$1" ] && { ! [ -e "$1" ] || { [ -f "$1" ] && mine "$1"; }; }
}

above() { # the folder, or what there is of those that it is in
  at=$folder
  while ! [ -d "$at" ] && ! [ -e "$at" ] && ! [ -L "$at" ]; do at=$(dirname -- "$at"); done
  printf '%s' "$at"
}
why_not() { # why nothing may be written; nothing if it may
  at=$(above)
  case $folder in
    # Where anybody may make a folder of this name, somebody may have.
    /tmp/* | /var/tmp/*) [ "$at" != "$folder" ] || { ! [ -L "$at" ] && mine "$at"; } ||
      { echo "$at belongs to another user, or is a link"; return; } ;;
  esac
  [ -d "$at" ] || { echo "$at is not a folder"; return; }
  [ -w "$at" ] || { echo "you may not write in $at"; return; }
  for file in "$whole" "$part"; do
    ours "$file" || { echo "$file belongs to another user, or is not a plain file"; return; }
  done
  if [ -e "$whole" ] && ! head -c 8 -- "$whole" | grep -qa '^MOTLEYPK'; then
    echo "$whole exists, and is not a packed data set"
  fi
}

look() {
  why=$(why_not)
  if [ -n "$why" ]; then printf 'not=%s\n' "$why"; return; fi
  if [ -e "$whole" ]; then echo "complete=$(bytes "$whole")"; fi
  # What is kept of a copy that was cut needs no room any more.
  if [ -e "$part" ]; then echo "part=$(bytes "$part")"; fi
  echo "free=$(df -Pk -- "$(above)" | awk 'END { printf "%.0f", 1024 * $4 }')"
}

hashes() { # of the file if it has the right size, else of what a copy that was cut has left
  file=$part
  if [ -e "$whole" ] && [ "$(bytes "$whole")" = "$size" ]; then file=$whole; fi
  [ "$what" = hash-part ] && file=$part
  [ "$file" = "$part" ] && echo part
  [ -e "$file" ] || return 0
  number=0 end=$(bytes "$file")
  while [ $((number * block)) -lt "$end" ]; do
    hash_of "$file" "$number"
    number=$((number + 1))
  done
}

write_blocks() {
  umask 077
  mkdir -p -- "$folder" || exit
  why=$(why_not)
  if [ -n "$why" ]; then echo "$why" >&2; exit 1; fi
  : >>"$part" || exit
  [ "$(bytes "$part")" -le "$size" ] || truncate -s "$size" -- "$part"
  for run in "$@"; do
    number=${run%-*}
    while [ "$number" -le "${run#*-}" ]; do
      length=$((size - number * block))
      [ "$length" -le "$block" ] || length=$block
      told=$(dd bs=65536 iflag=fullblock,count_bytes count="$length" of="$part" conv=notrunc \
        oflag=seek_bytes seek=$((number * block)) 2>&1)
      case $told in
        *"
$length byte"*) ;;
        *) echo "$told" >&2; exit 1 ;; # the disk is full, or nothing comes any more
      esac
      wait # what is hashed is read while the next block comes
      hash_of "$part" "$number" &
      number=$((number + 1))
    done
  done
  wait
}

case $what in
  look) look ;;
  hash | hash-part) hashes ;;
  write) shift 6; write_blocks "$@" ;;
  finish)
    [ -z "$(why_not)" ] && [ "$(bytes "$part")" = "$size" ] && sync -- "$part" &&
      mv -f -T -- "$part" "$whole"
    ;;
  *) exit 2 ;;
esac
