#!/usr/bin/env bash
# Ask every host of hosts.txt, at once and within 10 s, whether it is ready to
# train: one table of what each is, and what is wrong with which fix.
#
#   bash setup/test_cn_connection.sh
#   bash setup/test_cn_connection.sh --hostfile my_hosts.txt
#   bash setup/test_cn_connection.sh --json > lab.json
#
# Nothing stays changed: on each host one small file is written to the
# repository's folder and one to your home, and removed at once, to see whether
# that works.
#
# Options:
#   --hostfile FILE   default: hosts.txt in the repository
#   --json            one JSON object instead; test_cn_connection.py describes it
#   --dry-run         say which hosts would be asked, and ask none
#
# Exit status: 0 all is well, 1 some host is not, 2 no host was asked.
source "$(dirname -- "${BASH_SOURCE[0]}")/door.sh"
