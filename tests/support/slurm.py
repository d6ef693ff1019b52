"""A real Slurm, of this machine or of a lab's hosts, as an ordinary user where that is enough."""

import secrets
from collections.abc import Sequence
from pathlib import Path

from jobs import needs, wait_until
from lab_door import Door

PROGRAMS = ("slurmctld", "slurmd", "munged", "srun")
_CONF = """
ClusterName=motley
AuthType=auth/munge
CryptoType=crypto/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=pmix
ReturnToService=2
SchedulerType=sched/builtin
SelectType=select/linear
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
PartitionName=all Nodes=ALL Default=YES OverSubscribe=FORCE:8 State=UP
"""


def write_conf(path: Path, **settings: object) -> None:
    """Of a cluster whose machines are settings too, as ``NodeName="n[1-2] CPUs=2"``."""
    own = "".join(f"{name}={value}\n" for name, value in settings.items())
    path.write_text(own + _CONF)


_DAEMONS = """
export PATH=$PATH:/usr/sbin SLURM_CONF=$HOME/slurm/slurm.conf
mkdir -p -m 755 /tmp/munge
munged --force --socket=/tmp/munge.socket --key-file=$HOME/slurm/munge.key \\
  --pid-file=/tmp/munge/pid --log-file=/tmp/munge/log --seed-file=/tmp/munge/seed
for daemon in {daemons}; do setsid $daemon -D >/tmp/$daemon.out 2>&1 </dev/null & done
"""


def start_slurm(lab: Door, names: Sequence[str]) -> None:
    """Slurm on a lab's hosts, which share a home; the first is the controller. The daemons end
    with their hosts."""
    for program in PROGRAMS:
        needs(program, "Slurm")
    home = lab.home(names[0])
    folder = home / "slurm"
    lab.on(names[0], "mkdir", "-p", "-m", "755", "slurm/state")
    user = lab.on(names[0], "id", "-un")
    there = f"/home/{home.name}/slurm"
    write_conf(
        folder / "slurm.conf", SlurmctldHost=names[0], SlurmUser=user, SlurmdUser=user,
        AuthInfo="socket=/tmp/munge.socket,cred_expire=5",
        StateSaveLocation=f"{there}/state",
        SlurmdSpoolDir="/tmp/spool", SlurmctldPidFile="/tmp/slurmctld.pid",
        SlurmdPidFile="/tmp/slurmd.pid", SlurmctldLogFile=f"{there}/slurmctld.log",
        SlurmdLogFile=f"{there}/slurmd.%n.log", NodeName=f"{','.join(names)} CPUs=2 State=UNKNOWN",
    )  # fmt: skip
    lab.on(names[0], "sh", "-c", "umask 077; cat >slurm/munge.key", stdin=secrets.token_hex(64))
    for name in names:
        daemons = "slurmctld slurmd" if name == names[0] else "slurmd"
        lab.on(name, "bash", "-c", _DAEMONS.format(daemons=daemons))
    idle = ("env", f"SLURM_CONF={there}/slurm.conf", "sinfo", "-h", "-t", "idle", "-o", "%D")
    wait_until(lambda: lab.run("exec", names[0], "--", *idle).output.strip() == str(len(names)), 30)
