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
flag='' left=$# entry=false
while [ "$left" -gt 0 ]; do
  word=$1 left=$((left - 1))
  shift
  case $word in */entry_cn.sh | *.py) entry=true ;; esac
  case $flag in
    --hostfile | -hostfile | --machinefile | -machinefile)
      if ! $entry && [ -f "$word" ] && grep -q -e "^$mark" -e "$end\$" -- "$word"; then
        echo "motley: $word has a byte-order mark or Windows line ends, which are left out" >&2
        # The file is gone as soon as it is open: nothing has to remove it in the end.
        plain=$(mktemp) || exit
        sed "1s/^$mark//; s/$end\$//" <"$word" >"$plain"
        exec 9<"$plain"
        rm -f -- "$plain"
        word=/dev/fd/9
      fi ;;
  esac
  flag=$word
  set -- "$@" "$word"
done
exec "$(dirname -- "$(readlink -f -- "$0")")/mpiexec" "$@"
