#!/usr/bin/env bash
# From a password to keys: afterwards ssh, and so mpirun, reaches every host of
# hosts.txt without asking.
#
#   bash setup/passwordless_ssh.sh                    # asks for the password once
#   bash setup/passwordless_ssh.sh --dry-run          # says what it would do
#   bash setup/passwordless_ssh.sh --known-hosts FILE # host keys from its lines
#   bash setup/passwordless_ssh.sh --mesh             # and every host to every other
#   bash setup/passwordless_ssh.sh --remove           # undoes it, on every host
#
# Here it makes a key of its own, ~/.ssh/id_ed25519_motley, names the hosts that
# need it at the end of ~/.ssh/config, between "# motley: begin" and "# motley:
# end", and pins host keys in ~/.ssh/known_hosts, after showing them. On each
# host it adds one line to ~/.ssh/authorized_keys (restrict,pty: no forwarding
# of any kind), and takes others' right to write to ~ and any right to ~/.ssh
# and that file, without which sshd ignores it. A host that lets you in already
# is not touched, nor are your own keys. The password is asked on the terminal,
# goes to the hosts alone, and is kept nowhere. The same again changes nothing,
# and finishes what was stopped half-way.
#
# Options:
#   --hostfile FILE   default: hosts.txt in the repository
#   --known-hosts FILE   host keys, as your administrator may give you, instead
#                     of asking; others are refused
#   --mesh            mpirun does not need it: it starts all ranks from here. If
#                     homes are not shared, each host gets a key of its own
#   --remove          on all hosts that the block in ~/.ssh/config names; pinned
#                     host keys and tightened permissions stay
#   --dry-run         print every change, do none
#
# Exit status: 0 every host lets you in, 1 some host does not, 2 nothing was
# begun.
source "$(dirname -- "${BASH_SOURCE[0]}")/door.sh"
