#!/usr/bin/env bash
# A Python for Motley alone, where the machine's own is too old or missing; no root needed.
#
#   bash setup/get_python.sh .venv-python                 # the newest 3.12, 30 MB; or as FILE is
#   bash setup/get_python.sh .venv-python --version 3.11
#   bash setup/get_python.sh .venv-python --archive cpython-3.12.8+20241219-x86_64-unknown-linux-gnu-install_only.tar.gz
#
# usage: get_python.sh FOLDER [--archive FILE] [--version 3.X]
#
# A standalone build of https://github.com/astral-sh/python-build-standalone, checked against
# that project's SHA256SUMS when it comes from the network; "install_only" archives of it can
# be given as FILE. FOLDER then holds bin/python3. One that works already is left alone. (uv
# fetches such a build too; but without a Python uv itself would have to be fetched first.)
#
# Variables: MOTLEY_PYTHON_URL, a mirror: where SHA256SUMS and the archives lie.
set -euo pipefail

folder='' archive='' version=''
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) sed -n '2,/^set /{/^set /d; s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit 0 ;;
    --archive) archive=${2:?--archive needs a file}; shift ;;
    --version) version=${2:?--version needs a number such as 3.12}; shift ;;
    -*) echo "motley: unknown option $1; see get_python.sh -h" >&2; exit 2 ;;
    *) folder=$1 ;;
  esac
  shift
done
: "${folder:?name the folder; see get_python.sh -h}"

works() { # of the wanted version, and can make environments
  "$1/bin/python3" -c "import ensurepip, sys, venv
is_it = '%d.%d' % sys.version_info[:2] == sys.argv[1] if sys.argv[1] else sys.version_info >= (3, 11)
sys.exit(not is_it)" "$version" 2>/dev/null
}

fetch() { # URL FILE, with what the machine has
  if command -v curl >/dev/null; then
    curl -fsSL --retry 3 -o "$2" -- "$1"
  elif command -v wget >/dev/null; then
    wget -q -O "$2" -- "$1"
  elif command -v python3 >/dev/null; then
    python3 -c 'import sys, urllib.request; urllib.request.urlretrieve(*sys.argv[1:])' "$1" "$2"
  else
    echo "motley: no curl, wget or python3 on $(uname -n) to fetch $1 with" >&2
    return 1
  fi
}

download() { # into FOLDER.tar.gz
  local url=${MOTLEY_PYTHON_URL:-https://github.com/astral-sh/python-build-standalone/releases/latest/download}
  local wanted line
  wanted="cpython-$version\.[0-9+]*-$(uname -m)-unknown-linux-gnu-install_only\.tar\.gz"
  if ! fetch "$url/SHA256SUMS" "$folder.sums"; then
    echo "motley: $(uname -n) has no Python $version for the environment, and cannot fetch one from" \
      "$url; fetch an install_only archive of it elsewhere and give it with --python-archive FILE" >&2
    return 2
  fi
  line=$(grep -E "^[0-9a-f]{64}  $wanted$" "$folder.sums" | sort -k 2 -V | tail -n 1)
  rm -f "$folder.sums"
  if [ -z "$line" ]; then
    echo "motley: $url has no Python $version for $(uname -m); see its SHA256SUMS" >&2
    return 2
  fi
  echo "python: fetching ${line#*  }"
  fetch "$url/${line#*  }" "$folder.tar.gz"
  if ! sha256sum -c --quiet <<<"${line%%  *}  $folder.tar.gz"; then
    echo "motley: ${line#*  } from $url is not what its SHA256SUMS says; try again" >&2
    return 1
  fi
}

if works "$folder"; then exit 0; fi
[ -n "$version$archive" ] || version=3.12
mkdir -p "$(dirname -- "$folder")"
rm -rf "$folder.new"
trap 'rm -rf "$folder.new" "$folder.sums" "$folder.tar.gz"' EXIT
if [ -z "$archive" ]; then
  download
  archive=$folder.tar.gz
fi
mkdir "$folder.new"
if ! tar -xf "$archive" -C "$folder.new" --strip-components 1; then
  echo "motley: $archive cannot be unpacked; it should be an install_only .tar.gz" >&2
  exit 2
fi
if ! works "$folder.new"; then
  found=$("$folder.new/bin/python3" -V 2>&1) || found="no working bin/python3"
  echo "motley: $archive has $found; the environment needs Python ${version:->= 3.11} for $(uname -m)" >&2
  exit 2
fi
rm -rf "$folder"
mv "$folder.new" "$folder"
