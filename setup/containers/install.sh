#!/usr/bin/env bash
# What an image is made of: Debian's packages, then Motley's environment beside its files.
#
#   bash /opt/motley/setup/containers/install.sh
#
# Dockerfile and motley.def run it inside an image, as root. TORCH: a build of torch, such as
# cu126; default: PyPI's.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)
case ${1:-} in
  -h | --help) sed -n '2,/^set /{/^set /d; s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit 0 ;;
esac

packages=(
  ca-certificates
  python3 python3-venv
  python3-dev g++ # --compile builds with them
  openssh-client  # by which mpirun starts ranks elsewhere
)
apt-get update
DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${packages[@]}"
bash "$root/setup/make_env.sh" ${TORCH:+--torch "$TORCH"}
# Whoever --user names cannot write here what Python compiles, and would wait for it at each start.
# Some packages bring files for other Pythons, which do not compile.
"$root/.venv/bin/python" -m compileall -qq "$root/src" "$root/.venv/lib" || true
apt-get clean
rm -rf /var/lib/apt/lists/* /root/.cache
