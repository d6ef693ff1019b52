#!/usr/bin/env bash
# Make the same environment, with the same versions, at the same path on every
# host of hosts.txt.
#
#   bash setup/install_cn.sh
#   bash setup/install_cn.sh --dry-run            # what each host lacks
#   bash setup/install_cn.sh --python-archive cpython-3.12-install_only.tar.gz
#   .venv/bin/pip download uv -r .venv/requirements.lock -d wheels  # with a network
#   bash setup/install_cn.sh --offline wheels     # hosts without one
#
# This machine's environment (setup/make_env.sh) is the model. torch's build is
# chosen by the oldest GPU and the lowest driver of all hosts
# (src/motley/provision/install_cn.py), and replaced here if it does not run on them. Hosts
# that share this folder need nothing more; the others get the files that git
# tracks, a standalone Python where theirs is not the same 3.X (from the
# network, or the archive given), and the versions of .venv/requirements.lock: 6
# GB and some minutes, all at once. At the end each host imports the packages
# and runs a kernel. Cut short, the same command goes on where it was. Changed
# are the repository's folder, the environment and pip's cache, nothing else.
#
# Options:
#   --hostfile FILE   default: hosts.txt in the repository
#   --python-archive FILE   an install_only archive of python-build-standalone
#                     for hosts that need a Python and have no network
#   --offline FOLDER  install from its wheels alone; by pip if uv is not among them
#   --dry-run         print every change, do none
#
# Exit status: 0 all hosts are ready, 1 some host is not, 2 nothing was begun.
source "$(dirname -- "${BASH_SOURCE[0]}")/door.sh"
