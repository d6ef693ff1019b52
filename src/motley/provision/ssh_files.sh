# shellcheck shell=sh
# shellcheck disable=SC2088  # a ~ in messages is for the reader
# What passwordless_ssh.sh does to the ~/.ssh of one host, this machine too: it sends these
# functions there and names one. Each does nothing where all is so already, prints a line for
# each change, and may be killed at any point: the same again finishes.
set -eu
umask 077
key=.ssh/id_ed25519_motley
config=.ssh/config
keys=.ssh/authorized_keys
cd -- "$HOME"

# tighten PATH BITS: take these permissions (octal) from it.
tighten() {
  was=$(stat -Lc %a -- "$1")
  now=$(printf %o $((0$was & ~0$2)))
  [ "$was" = "$now" ] && return
  chmod "$now" -- "$1"
  [ "$1" = . ] && set -- ''
  echo "mode of ~/$1 changed from $was to $now"
}

# append FILE LINE: after its last line, newline or not; all of it or, on a full disk, nothing.
append() {
  size=0
  lead=
  if [ -s "$1" ]; then
    size=$(wc -c <"$1")
    [ -z "$(tail -c 1 -- "$1")" ] || lead='
'
  fi
  printf '%s%s\n' "$lead" "$2" | cat >>"$1" && return
  [ -f "$1" ] && dd if=/dev/null of="$1" bs=1 seek="$size" 2>/dev/null
  return 1
}

# real FILE: where it is, behind any links; a new file may take its place there.
real() { readlink -f -- "$1" || { echo "~/$1 is a link to nowhere" >&2; return 1; }; }

# take_place FILE NEW WORDS...: unless it says the same; an empty file goes.
take_place() {
  if cmp -s -- "$1" "$2"; then
    rm -f -- "$2"
    return
  fi
  if [ -s "$2" ] || [ -L "$1" ]; then mv -f -- "$2" "$(real "$1")"; else rm -f -- "$1" "$2"; fi
  shift 2
  echo "$*"
}

# make_key COMMENT: this host's own key, unless there is one; prints its public half.
make_key() {
  mkdir -p .ssh
  tighten .ssh 022 >/dev/null
  if ! [ -e "$key" ]; then
    rm -f "$key.new" "$key.new.pub"
    ssh-keygen -q -t ed25519 -N '' -C "$1" -f "$key.new" </dev/null
    mv -f "$key.new.pub" "$key.pub"
    mv -f "$key.new" "$key"
  fi
  tighten "$key" 077 >/dev/null
  if ! half=$(ssh-keygen -y -P '' -f "$key" 2>&1); then
    echo "~/$key cannot be used ($half); move it away" >&2
    return 1
  fi
  [ -s "$key.pub" ] || echo "$half" >"$key.pub"
  cat -- "$key.pub"
}

public_key() { [ ! -s "$key.pub" ] || cat -- "$key.pub"; }

# authorize LINE...: into authorized_keys, which sshd heeds only where nobody else may write.
authorize() {
  added=0
  mkdir -p .ssh
  tighten . 022
  tighten .ssh 077
  for line do
    half=$(echo "$line" | cut -d ' ' -f 3)
    if [ -f "$keys" ] && grep -F -- "$half" "$keys" | grep -qv '^[[:space:]]*#'; then continue; fi
    append "$keys" "$line"
    added=$((added + 1))
  done
  [ "$added" = 0 ] || echo "keys added to ~/$keys: $added"
  tighten "$keys" 0177
  if command -v restorecon >/dev/null; then restorecon -F .ssh "$keys" 2>/dev/null || true; fi
}

# unauthorize HEAD TAG: drop the lines of authorized_keys with that key, or for that mesh.
unauthorize() {
  [ -f "$keys" ] || return 0
  new=$(real "$keys").motley
  cp -p -- "$keys" "$new"
  grep -vF -e "${1:?}" -e "${2:?}" -- "$keys" >"$new" || [ $? = 1 ]
  take_place "$keys" "$new" "key removed from ~/$keys"
}

# pin LINE...: into known_hosts.
pin() {
  mkdir -p .ssh
  for line do
    if grep -qsxF -e "$line" .ssh/known_hosts; then continue; fi
    append .ssh/known_hosts "$line"
    echo "host key of ${line%% *} pinned in ~/.ssh/known_hosts"
  done
}

# pin_new LINE...: the same, but not of a host of which it holds any key.
pin_new() {
  for each do
    ssh-keygen -F "${each%% *}" -f .ssh/known_hosts >/dev/null 2>&1 || pin "$each"
  done
}

# block_hosts: those that our block of ~/.ssh/config names.
block_hosts() {
  [ ! -f "$config" ] ||
    sed -n '/^# motley: begin$/,/^# motley: end$/s/^Host //p' "$config" | tr ' ' '\n'
}

# add_to_block HOST...
add_to_block() {
  mkdir -p .ssh
  # shellcheck disable=SC2046  # host names hold no spaces
  set_block $( (block_hosts; printf '%s\n' "$@") | awk '!seen[$0]++')
}

# set_block HOST...: these alone; none removes the block. It stands last, so that what the
# user says about a host goes first.
set_block() {
  [ -e "$config" ] || [ $# -gt 0 ] || return 0
  new=$(real "$config").motley
  rm -f -- "$new"
  if [ -e "$config" ]; then
    cp -p -- "$config" "$new"
    awk '/^# motley: begin$/ {inside = 1} !inside {print} /^# motley: end$/ {inside = 0}
      END {exit inside}' "$config" >"$new" || {
      [ $? = 1 ] || return 1
      rm -f -- "$new"
      echo "~/$config has a '# motley: begin' without its end; remove that part" >&2
      return 1
    }
  fi
  if [ $# -gt 0 ]; then
    printf '%s\n' '# motley: begin' "Host $*" "  IdentityFile ~/$key" '  IdentitiesOnly yes' \
      '# motley: end' >>"$new"
  fi
  take_place "$config" "$new" "our block of ~/$config names ${*:-nobody}"
}

# remove_key: what make_key made.
remove_key() {
  [ -e "$key" ] || [ -e "$key.pub" ] || return 0
  rm -f -- "$key" "$key.pub"
  echo "~/$key removed"
}

# leave HEAD TAG: undo all that another host, the head, did here; last what lets it in.
leave() {
  if [ -f "$key.pub" ] && grep -qF -- "$2" "$key.pub"; then
    set_block
    remove_key
  fi
  unauthorize "$1" "$2"
}

# try_ssh HOST...: as mpirun would, all at once; a line for each, "HOST works" or "HOST why not".
try_ssh() {
  jobs=
  for host do
    {
      if said=$(timeout 15 ssh -o BatchMode=yes -o ConnectTimeout=5 -- "$host" true 2>&1 \
        >/dev/null </dev/null); then said=works; fi
      echo "$host $(echo "${said:-no answer}" | tail -n 1)"
    } &
    jobs="$jobs $!"
  done
  # shellcheck disable=SC2086  # these alone: whoever sent this has a job in the background too
  wait $jobs
}
