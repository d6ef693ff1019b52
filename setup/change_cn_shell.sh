#!/usr/bin/env bash
# Changes your login shell on every host of hosts.txt, where the host lets you.
#
#   bash setup/change_cn_shell.sh                    # to /bin/bash
#   bash setup/change_cn_shell.sh --shell /bin/tcsh  # or to another one, or back
#   bash setup/change_cn_shell.sh --dry-run          # says what it would do
#
# You need not: Motley and mpirun work under tcsh too. It shows what each host
# has, asks, asks for your password once (chsh wants it), then logs in to each
# host again, and changes the shell back where that fails. Where a directory
# (LDAP, NIS) keeps your account, nothing is changed. Needs ssh without a
# password: bash setup/passwordless_ssh.sh Nothing but the account's login shell
# is changed, through the host's own chsh.
#
# Options:
#   --hostfile FILE   default: hosts.txt in the repository
#   --shell PATH      default: /bin/bash; must be in each host's /etc/shells
#   --dry-run         print every change, do none
#
# Exit status: 0 every host has that shell or needs none, 1 some host has not, 2
# nothing was begun.
source "$(dirname -- "${BASH_SOURCE[0]}")/door.sh"
