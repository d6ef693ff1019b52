"""An mpirun or srun line as a user types it, and variants of the line without some hosts."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from motley.cluster.hostfile import Host, allocated_nodes, check_name, expand_nodes, read_hosts
from motley.errors import MotleyError
from motley.text import RUN

_TASKS, _NODES, _LIST = ("-n", "--ntasks"), ("-N", "--nodes"), ("-w", "--nodelist")
_PER_NODE = ("--ntasks-per-node",)
_BARE = {"--resume": "auto"}  # values of options that are given without one
NODE_COUNTS = ("SLURM_JOB_NUM_NODES", "SLURM_NNODES")  # variables with the size of the allocation


def hosts_of_step(
    words: Sequence[str], environ: Mapping[str, str] = os.environ
) -> tuple[Host, ...]:
    """Return the nodes on which srun starts ranks, with the number of ranks on each.

    The result is empty outside of an allocation.

    Args:
        words: words of the line, from srun on.
        environ: environment with Slurm's variables.
    """
    nodes = allocated_nodes(environ)
    if named := _value(words, _LIST):
        nodes = [node for node in expand_nodes(named) if node in nodes]
    nodes = nodes[: _number(_value(words, _NODES)) or len(nodes)]
    if not nodes:
        return ()
    each = _number(_value(words, _PER_NODE))
    tasks = _number(_value(words, _TASKS)) or _number(environ.get("SLURM_NTASKS"))
    if tasks is None or (each and each * len(nodes) <= tasks):
        return tuple(Host(node, each or 1) for node in nodes)
    most, more = divmod(tasks, len(nodes))
    counts = [most + (number < more) for number in range(len(nodes))]
    return tuple(Host(node, count) for node, count in zip(nodes, counts, strict=True) if count)


def on_hosts(words: Sequence[str], hosts: Sequence[Host]) -> list[str]:
    """Return the words of an srun line that starts ranks on these nodes alone.

    The job step does not wait for other job steps on these nodes.
    """
    remaining = list(words)
    for flags in (_TASKS, _NODES, _LIST, _PER_NODE):
        remaining = _without(remaining, flags)
    tasks = sum(host.slots for host in hosts)
    names = ",".join(host.name for host in hosts)
    most = max(host.slots for host in hosts)
    return [
        remaining[0], "--overlap", f"--nodes={len(hosts)}", f"--ntasks={tasks}",
        f"--ntasks-per-node={most}", f"--nodelist={names}", *remaining[1:],
    ]  # fmt: skip


def _number(value: str | None) -> int | None:
    return int(value) if value and value.isdigit() and int(value) else None


def _value(words: Sequence[str], flags: Sequence[str]) -> str | None:
    """Return the value of the option of ``flags`` that comes last in the line; None without one.

    Values have the forms ``-n 3``, ``-n3``, ``--ntasks 3`` and ``--ntasks=3``.
    """
    result = None
    for at, word in enumerate(words):
        for flag in flags:
            if word == flag and at + 1 < len(words):
                result = words[at + 1]
            elif _is_joined(word, flag):
                result = word.removeprefix(flag).removeprefix("=")
    return result


def _without(words: Sequence[str], flags: Sequence[str]) -> list[str]:
    remaining, skip = list[str](), False
    for word in words:
        own = skip or word in flags or any(_is_joined(word, flag) for flag in flags)
        skip = not skip and word in flags
        if not own:
            remaining.append(word)
    return remaining


def _is_joined(word: str, flag: str) -> bool:
    start = f"{flag}=" if flag.startswith("--") else flag
    return word.startswith(start) and word != flag and not (start == flag and word[1] == "-")


_MPI = ("mpirun", "mpiexec", "prterun", "orterun")
_SLURM = "srun"
_LAUNCHERS = (*_MPI, _SLURM)
_RANKS = ("-np", "--np", "-n", "--n")
_HOSTFILES = ("--hostfile", "-hostfile", "--machinefile", "-machinefile")
_LISTS = ("-H", "--host", "-host")  # options with a list of hosts, as in a:2,b
_ENTRY = "entry_cn.sh"
_BY_RANK = ("--shares", "--precision", "--micro-batch")  # options with one value per rank
_EXAMPLE = "mpirun -np 5 --hostfile hosts.txt ./entry_cn.sh"


@dataclass(frozen=True)
class LaunchLine:
    """A line that starts the ranks of a training.

    Attributes:
        words: words of the line.
        hosts: hosts in the line's hostfile or list of hosts, or of Slurm's allocation; empty: the
            line names no hosts.
    """

    words: tuple[str, ...]
    hosts: tuple[Host, ...]

    @classmethod
    def parse(cls, words: Sequence[str]) -> "LaunchLine":
        """Return a user's line, parsed. Raise MotleyError if the line does not start a training."""
        line = [word for word in words if word != "--"] if words[:1] == ["--"] else list(words)
        if not line:
            raise MotleyError(
                "the command to run is missing; give one, as in: bash setup/keep_training.sh "
                f"{_EXAMPLE}"
            )
        if _name(line[0]) not in _LAUNCHERS:
            raise MotleyError(
                f"{line[0]!r} does not start ranks; begin the command with one of "
                f"{', '.join(_LAUNCHERS)}, as in: {_EXAMPLE}"
            )
        if not _find_rank_words(line):
            raise MotleyError(
                f"the command lacks ./{_ENTRY}, which starts each rank; write it as in: {_EXAMPLE}"
            )
        result = cls(tuple(line), ())
        if result.under_slurm:
            return replace(result, hosts=hosts_of_step(line[: result._entry]))
        result = result._with_split_options()
        hostfile, named = result._launcher_value(_HOSTFILES), result._launcher_value(_LISTS)
        if named:
            return replace(result, hosts=_hosts_of_list(named))
        return replace(result, hosts=read_hosts(hostfile)) if hostfile else result

    def _with_split_options(self) -> "LaunchLine":
        """Return the line with options such as ``--hostfile=F`` as two words."""
        own = list[str]()
        for word in self.words[: self._entry]:
            flag, joined, value = word.partition("=")
            known = joined and flag in (*_HOSTFILES, *_LISTS, *_RANKS)
            own += [flag, value] if known else [word]
        return replace(self, words=(*own, *self.words[self._entry :]))

    @property
    def _entry(self) -> int:
        """Index of the first word that belongs to the ranks."""
        return _find_rank_words(self.words)

    @property
    def under_slurm(self) -> bool:
        """True if Slurm starts the ranks."""
        return _name(self.words[0]) == _SLURM

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return Path(self._value("--logs") or "logs") / str(self._value("--run"))

    @property
    def save_every(self) -> str | None:
        """Value of --save-every in the user's line; None without it."""
        return self._value("--save-every")

    def saving_every(self, interval: str) -> "LaunchLine":
        """Return the line with ``--save-every``, unless the user's line has this option."""
        return self if self.save_every else self._with_option("--save-every", interval)

    def trial(self) -> tuple[str, ...]:
        """Return the command line with a test program, which kills one rank, as its script."""
        *start, last = self.words[: self._entry]
        program = (last, "setup/hello_mpi.py") if Path(last).name == _ENTRY else ("hello",)
        return (*start, *program, "--lose-one")

    def named(self, usual: str) -> "LaunchLine":
        """Return the line with a name for the run's folder: the user's name, or else ``usual``."""
        line = self
        if self.has_own_loop:  # the script may choose another folder for runs
            line = self._with_option("--logs", self._value("--logs") or "logs")
        return line if line._value("--run") else line._with_script()._with_option("--run", usual)

    def resumed(self, has_own: bool) -> "LaunchLine":
        """Return the line that continues from the run's newest checkpoint.

        Args:
            has_own: True if the run has a checkpoint. If not, a ``--resume`` in the user's line
                stays.
        """
        if self.has_own_loop or (not has_own and self._value("--resume")):
            return self  # lab.resume() finds the checkpoint
        return self._with_option("--resume", "auto")

    @property
    def hosts_with_ranks(self) -> frozenset[str]:
        """Names of the hosts that have a rank; a hostfile may have more hosts than ranks need."""
        return frozenset(self._places)

    @property
    def _places(self) -> list[str]:
        """Host of each rank, by rank."""
        seats = [host.name for host in self.hosts for _ in range(host.slots)]
        requested = self._launcher_value(_RANKS)
        return seats[: int(requested)] if requested and requested.isdigit() else seats

    def with_hosts(self, alive: Sequence[Host], hostfile: Path) -> "LaunchLine":
        """Return the line for the hosts ``alive`` alone.

        Args:
            alive: the hosts that stay.
            hostfile: file for the names of these hosts, if some are left out.
        """
        if len(alive) == len(self.hosts):
            return self
        names = {host.name for host in alive}
        stay = [name in names for name in self._places]
        result = self._on(alive, sum(stay), hostfile)
        for flag in _BY_RANK:
            each = (result._value(flag) or "").split(",")
            if len(each) == len(stay) > 1:
                remaining = [value for value, stays in zip(each, stay, strict=True) if stays]
                result = result._with_option(flag, ",".join(remaining))
        return result

    def _on(self, hosts: Sequence[Host], ranks: int, hostfile: Path) -> "LaunchLine":
        own = list(self.words[: self._entry])
        if self.under_slurm:
            return replace(self, words=(*on_hosts(own, hosts), *self.words[self._entry :]))
        named = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        for flags, value in ((_HOSTFILES, str(hostfile)), (_LISTS, named), (_RANKS, str(ranks))):
            for at, word in enumerate(own):
                if word in flags:
                    own[at + 1] = value
        if hostfile.parent.is_dir():
            hostfile.write_text("".join(f"{host.name} slots={host.slots}\n" for host in hosts))
        return replace(self, words=(*own, *self.words[self._entry :]))

    def _launcher_value(self, flags: Sequence[str]) -> str | None:
        own = self.words[: self._entry]
        return next((own[at + 1] for at, word in enumerate(own[:-1]) if word in flags), None)

    def _value(self, flag: str) -> str | None:
        """Return the value of a training script's option in the line; None without the option."""
        if self.has_own_loop:
            words = [word.removeprefix("--export=ALL,") for word in self.words[: self._entry]]
            found = [word.partition("=")[2] for word in words
                     if word.partition("=")[0] == _variable(flag)]  # fmt: skip
            return found[-1] if found else None
        _, _, value = _find_option(self.words[self._entry :], flag)
        return value

    @property
    def has_own_loop(self) -> bool:
        """True if the script calls ``motley.join``. Motley does not know such a script's options.

        Environment variables then take the place of options, such as MOTLEY_RUN for ``--run``.
        """
        script = Path((*self.words[self._entry :], "")[0])
        if script.suffix != ".py" or not script.is_file():
            return False
        return "motley.join(" in script.read_text(errors="replace")

    def _with_variable(self, name: str, value: str) -> "LaunchLine":
        """Return the line, extended so that all ranks get an environment variable."""
        own = list(self.words[: self._entry])
        if self.under_slurm:
            start, text = f"--export=ALL,{name}=", f"--export=ALL,{name}={value}"
            own = [word for word in own if not word.startswith(start)]
            return replace(self, words=(own[0], text, *own[1:], *self.words[self._entry :]))
        for at, word in enumerate(own[1:], 1):
            if word.startswith(f"{name}=") and own[at - 1] == "-x":
                own[at - 1 : at + 1] = []
                break
        return replace(
            self, words=(own[0], "-x", f"{name}={value}", *own[1:], *self.words[self._entry :])
        )

    def _with_option(self, flag: str, value: str) -> "LaunchLine":
        if self.has_own_loop:
            return self._with_variable(_variable(flag), value)
        own, line = list(self.words[self._entry :]), self.words[: self._entry]
        first, end, _ = _find_option(own, flag)
        own[first:end] = [flag, value]
        return replace(self, words=(*line, *own))

    def _with_script(self) -> "LaunchLine":
        """Return the line with the name of its script, which a user may leave out.

        Options can only follow the script's name. Without a name, the default script is added.
        """
        if len(self.words) > self._entry or Path(self.words[-1]).name != _ENTRY:
            return self
        return replace(self, words=(*self.words, "torch_dist/train_vit.py"))


def _variable(flag: str) -> str:
    """Return the variable that replaces an option, such as MOTLEY_RUN for ``--run``."""
    return "MOTLEY_" + flag.lstrip("-").replace("-", "_").upper()


def _find_option(words: Sequence[str], flag: str) -> tuple[int, int, str | None]:
    """Return the indices at which an option begins and ends among words, and its value.

    For an absent option, both indices are the number of words, and the value is None.
    """
    for at, word in enumerate(words):
        name, is_joined, value = word.partition("=")
        if name.replace("_", "-") != flag:
            continue
        if is_joined:
            return at, at + 1, value
        if at + 1 < len(words) and not words[at + 1].startswith("--"):
            return at, at + 2, words[at + 1]
        return at, at + 1, _BARE.get(flag)
    return len(words), len(words), None


def _find_rank_words(words: Sequence[str]) -> int:
    """Return the index of the word after entry_cn.sh or ``motley train``; 0 without these words."""
    for at, word in enumerate(words, 1):
        if Path(word).name == _ENTRY:
            return at
        if Path(word).name == "motley" and " ".join(words[at : at + 1]) in ("train", RUN):
            return at + 1
    return 0


def _hosts_of_list(text: str) -> tuple[Host, ...]:
    """Return the hosts in a list such as ``a:2,b``. A host that is named twice has two slots.

    The result is empty for a list of places in an allocation (``+n0``) or for a list with ``a:*``,
    which stands for as many slots as cores.
    """
    slots = dict[str, int]()
    for word in filter(None, text.split(",")):
        name, _, count = word.partition(":")
        if name.startswith("+") or not (count or "1").isdigit():
            return ()
        slots[check_name(name)] = slots.get(name, 0) + int(count or "1")
    return tuple(Host(name, number) for name, number in slots.items())


def _name(launcher: str) -> str:
    """Return a launcher's name without its folder and its suffix, as mpirun for mpirun.openmpi."""
    return Path(launcher).name.partition(".")[0]
