# shellcheck shell=sh
# Not for you to run: motley.provision.host_report sends it to a host, which prints what it is as key=value
# lines. POSIX sh and the tools that every Linux has; nothing is left changed.
#
#   $1 repository, or this folder   $2 environment   $3 token file   $4 name for a file
#   $5 host to ssh to   $6 sources of the library; empty: the environment has it

printf 'clock=%s\n' "$(date +%s.%N)" # first: the sooner it comes, the less it is in doubt
root=$1 venv=$2 token=$3 mine=$4 next=$5 sources=$6
# This machine's own environment is on PATH when the head asks itself.
PATH=$(printf %s "$PATH" | tr : '\n' | grep -vxF "$venv/bin" | paste -sd : -):/usr/sbin:/sbin

can() { command -v "$1" >/dev/null 2>&1; }
within() { # within SECONDS COMMAND...: a driver or disk that hangs must not hold the rest
  if can timeout; then timeout "$@"; else shift; "$@"; fi
}
say() { # say KEY VALUE: one line, nothing where there is no value
  [ -z "$2" ] || printf '%s=%s\n' "$1" "$(printf %s "$2" | tr '\n' ' ')"
}

hop=
if [ -n "$next" ] && can ssh; then
  within 3 ssh -n -o BatchMode=yes -o ConnectTimeout=3 -o StrictHostKeyChecking=yes \
    -o UpdateHostKeys=no -o ClearAllForwardings=yes -- "$next" exit 0 >/dev/null 2>&1 &
  hop=$!
fi

user=$(id -un)
entry=$(getent passwd "$user" 2>/dev/null || grep "^$user:" /etc/passwd)
say node "$(uname -n)"
say user "$user"
say uid "$(id -u)"
say shell "${entry##*:}"
if cut -d : -f 1 /etc/passwd | grep -qxF "$user"; then say account local; else say account directory; fi
say machine "$(uname -m)"
say libc "$(getconf GNU_LIBC_VERSION 2>/dev/null)"
say cpu "$(sed -n 's/^model name[^:]*: *//p' /proc/cpuinfo | head -n 1)"
say cores "$(nproc 2>/dev/null)"
sed -n 's/^MemTotal: *\([0-9]*\) kB$/memory_total=\1/p; s/^MemAvailable: *\([0-9]*\) kB$/memory_free=\1/p' /proc/meminfo

room() { # room KEY FOLDER: its total and free KiB, and free inodes where they are counted
  within 5 df -Pk "$2" 2>/dev/null | awk -v k="$1" 'NR == 2 { print k "_total=" $2; print k "_free=" $4 }'
  within 5 df -Pi "$2" 2>/dev/null | awk -v k="$1" 'NR == 2 && $2 > 0 { print k "_inodes=" $4 }'
}
try() { # try KEY FOLDER: write a file there, and say what came of it
  # More than nothing, and to the disk itself: an empty file fits on a full disk, and a
  # network disk says only then that it is full.
  if why=$(dd if=/dev/zero of="$2/$mine" bs=8192 count=1 conv=fsync 2>&1); then say "$1" yes
  else say "$1" "$(printf '%s\n' "$why" | sed 's/.*: //; q')"
  fi
  rm -f "$2/$mine" 2>/dev/null
}
place=$root
until [ -d "$place" ]; do place=$(dirname -- "$place"); done
[ ! -d /dev/shm ] || room shm /dev/shm
room disk "$place"
say place "$place"
try place_write "$place"
home=${HOME:-$(printf %s "$entry" | cut -d : -f 6)}
say home "$home"
if [ -n "$home" ]; then try home_write "$home"; else say home_write 'HOME is not set'; fi
temporary=${TMPDIR:-/tmp}
say temporary "$temporary"
try temporary_write "$temporary"

if [ -d "$root${sources:+/setup}" ]; then
  say tree "$(stat -Lc '%d %i' "$root" 2>/dev/null) $(cat "$root"/setup/*.sh "$root"/setup/*.py 2>/dev/null | sha256sum | cut -d ' ' -f 1)"
  [ -z "$token" ] || { [ -e "$root/$token" ] && echo token=seen; }
fi

for name in python3.14 python3.13 python3.12 python3.11 python3 /usr/bin/python3; do
  found=$(command -v "$name" 2>/dev/null) || continue
  say python "$(within 5 "$found" -c 'import platform, sys
try:
    import ensurepip, venv
    able = "able"
except ImportError:
    able = "unable"
print(platform.python_version(), able, sys.argv[1])' "$found" 2>/dev/null)"
done

# An address of a tunnel is followed by its peer, which has the prefix.
ip -o -4 addr show up 2>/dev/null | awk '{
  split($2, n, "@"); split($4, a, "/"); split($5 == "peer" ? $6 : $4, p, "/")
  print "interface=" n[1] " " a[1] " " p[2]
}'
for folder in /sys/class/net/*; do
  speed=$(cat "$folder/speed" 2>/dev/null) && [ "$speed" -gt 0 ] && echo "speed=${folder##*/} $speed"
done
[ -z "$(ls /sys/class/infiniband 2>/dev/null)" ] || echo infiniband=yes

known=false # to Motley's own Python, which tells more of a GPU than nvidia-smi
python=$venv/bin/python
if [ -x "$python" ]; then
  # Each line as soon as it is known: a package that is broken does not hide the others.
  {
    if why=$(PYTHONPATH=$sources within 8 "$python" -P -c 'import json, platform
from importlib.metadata import distributions
print("environment=" + platform.python_version(), flush=True)
found = ((each.metadata["Name"], each.version) for each in distributions())
print("packages=" + json.dumps({name: version for name, version in found if name}), flush=True)
from motley.cluster.facts import main
print("facts=", end="")
main()' 2>&1 >&4)
    then known=true
    else say broken "$(printf '%s\n' "${why:-$python gave no answer}" | tail -n 1)"
    fi
  } 4>&1
elif [ -e "$python" ] || [ -L "$python" ]; then
  say broken "$python cannot be run"
fi

if ! $known && can nvidia-smi; then
  ask() { within 5 nvidia-smi --query-"$1" --format=csv,noheader,nounits; }
  if found=$(ask gpu=index,uuid,driver_version,memory.total,memory.used,compute_cap,name) ||
    # Drivers before 2021 do not know compute_cap.
    found=$(ask gpu=index,uuid,driver_version,memory.total,memory.used,name | sed 's/,\([^,]*\)$/, ,\1/')
  then
    printf '%s\n' "$found" | grep , | sed 's/^/gpu=/'
    ask compute-apps=gpu_uuid,pid,used_memory 2>/dev/null | while IFS=', ' read -r uuid pid mib; do
      [ -z "$mib" ] || echo "held=$uuid $mib $(stat -c '%u %U' "/proc/$pid" 2>/dev/null || echo '- ?')"
    done
  else
    say gpu_error "$(within 5 nvidia-smi 2>&1 | head -n 2)"
  fi
fi
# Said here, and not by who asked meanwhile: it would come in the middle of another line.
if [ -n "$hop" ]; then
  if wait "$hop"; then echo next=yes; else echo next=no; fi
fi
exit 0
