#!/bin/sh
# Copied by Motley's setup/make_env.sh: as mpiexec beside it, but root, which is all that a
# container has, may use it too, a hostfile may come from a Windows editor, and a shell may have
# the variables of a job of Slurm's that is over.
if [ "$(id -u)" = 0 ]; then
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
variables() { env | sed -n "s/^\($1[A-Za-z0-9_]*\)=.*/\1/p"; } # PREFIX: those that begin so
is_over() { # JOB: Slurm does not know it any more, or is not on this machine
  command -v squeue >/dev/null 2>&1 || return 0
  found=$(timeout 10 squeue -h -j "$1" -o %T 2>/dev/null)
  [ $? -ne 124 ] && [ -z "$found" ]
}
if [ -n "${SLURM_JOB_ID:-}" ] && is_over "$SLURM_JOB_ID"; then
  echo "motley: SLURM_JOB_ID is $SLURM_JOB_ID in this shell, and Slurm has no such job here:" \
    "variables that begin with SLURM_ are left out; open a new shell to be rid of them" >&2
  for name in $(variables SLURM_); do [ "$name" = SLURM_CONF ] || unset "$name"; done
fi
# A shell of srun --pty has the variables of a rank, and holds its nodes for itself.
[ -z "${SLURM_STEP_ID:-}" ] || export SLURM_OVERLAP=1
for name in $(variables PMIX_NAMESPACE) $(variables PMIX_RANK) $(variables PMIX_SERVER_) \
  $(variables PMI_); do unset "$name"; done
mark=$(printf '\357\273\277') end=$(printf '\r')
flag='' left=$# entry=false names=''
while [ "$left" -gt 0 ]; do
  word=$1 left=$((left - 1))
  shift
  case $word in */entry_cn.sh | *.py) entry=true ;; esac
  $entry || case $word in
    --hostfile=* | -hostfile=* | --machinefile=* | -machinefile=* | --host=* | -host=*)
      flag=${word%%=*} word=${word#*=}
      set -- "$@" "$flag" ;;
  esac
  $entry || case $flag in
    --hostfile | -hostfile | --machinefile | -machinefile)
      if [ -f "$word" ] && grep -q -e "^$mark" -e "$end\$" -- "$word"; then
        echo "motley: $word has a byte-order mark or Windows line ends, which Motley ignores" >&2
        # The file is gone as soon as it is open: nothing has to remove it in the end.
        plain=$(mktemp) || exit
        sed "1s/^$mark//; s/$end\$//" <"$word" >"$plain"
        exec 9<"$plain"
        rm -f -- "$plain"
        word=/dev/fd/9
      fi
      [ ! -r "$word" ] || names="$names $(sed 's/#.*//; s/^[[:space:]]*//; s/[[:space:]].*//' "$word")" ;;
    --host | -host | -H) names="$names $(printf %s "$word" | tr , '\n' | sed 's/:[0-9*]*$//')" ;;
  esac
  flag=$word
  set -- "$@" "$word"
done
# shellcheck disable=SC2086
names=$(printf '%s\n' $names | sort -u)
look_up() { # NAME: it and its address; at once for all, since one may take its time
  address=$(timeout 5 getent ahostsv4 "$1" 2>/dev/null | sed -n '1s/ .*//p')
  printf '%s %s\n' "$1" "$address"
}
at=$(for name in $names; do look_up "$name" & done | sort)
# Hosts whose own names differ behind the first dot alone are one host to mpirun and its ranks,
# unless both keep all of a name. It then takes the short name of this machine for another one's.
own=$(uname -n) short=$(uname -n | sed 's/\..*//')
if [ -n "$names" ] && ! printf '%s\n' "$at" | grep -q ' $' &&
  { [ "$own" = "$short" ] || ! printf '%s\n' "$names" | grep -qxF "$short"; }; then
  export PRTE_MCA_prte_keep_fqdn_hostnames="${PRTE_MCA_prte_keep_fqdn_hostnames:-1}"
  export PMIX_MCA_pmix_keep_fqdn_hostnames="$PRTE_MCA_prte_keep_fqdn_hostnames"
fi
# One machine under two names has two daemons, and its ranks never meet. This machine has none.
twice=$(printf '%s\n' "$at" | awk -v own=" 127.0.0.1 $(hostname -I 2>/dev/null) " '
  NF > 1 && !index(own, " " $2 " ") { if ($2 in seen) { print seen[$2] " and " $1; exit } seen[$2] = $1 }')
if [ -n "$twice" ]; then
  echo "motley: $twice are one machine; write it once in the hosts file, with the slots of both" >&2
  exit 2
fi
exec "$(dirname -- "$(readlink -f -- "$0")")/mpiexec" "$@"
