"""The function :func:`join`, with which a user's own loop starts. A call imports torch."""

import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from motley.errors import MotleyError
from motley.plan.precision import read_shares

if TYPE_CHECKING:
    from motley.library.lab import Lab

# In the environment: shares of the ranks, as in 5,0,3; folder of all runs; name of this run.
SHARES, LOGS, RUN = "MOTLEY_SHARES", "MOTLEY_LOGS", "MOTLEY_RUN"
STRATEGIES = ("ddp", "fsdp")
_LABS: list["Lab"] = []  # the one of this process


def join(
    *,
    shares: Sequence[float] | str | None = None,
    micro_batch: int | None = None,
    bn_group: int | None = None,
    strategy: str = "ddp",
    wire: str = "exact",
    precision: str = "auto",
    seed: int = 0,
    logs: str = "logs",
    run: str | None = None,
    allow: Collection[str] = (),
) -> "Lab":
    """Connect this script to all other ranks of its launch, and return a Lab, their interface.

    Call the function once, before the process group and the model are made::

        lab = motley.join()
        model, optimizer = lab.prepare(model, optimizer)
        loader = lab.loader(train_loader)
        for epoch in lab.epochs(10):
            for x, y in loader:
                lab.backward(loss_fn(model(x), y))
                optimizer.step()
                optimizer.zero_grad()

    Start the script as ``mpirun -np 5 --hostfile hosts.txt motley run SCRIPT.py``, with srun or
    torchrun, or alone. Without a launcher, and without ``shares``, ``micro_batch`` and
    ``bn_group``, everything is as in the script without Motley, to the last bit.

    Args:
        shares: relative number of rows of each rank, such as ``[5, 0, 3]`` or ``"5,0,3"``. None:
            the environment variable MOTLEY_SHARES in this form. Without the variable, shares are
            equal at first, and then proportional to each rank's measured speed.
        micro_batch: largest number of rows that a rank computes at once. None: all of its rows.
        bn_group: number of rows over which each batch norm takes its statistics ("ghost batch
            norm"). Each rank computes whole groups, so that the result does not depend on the
            shares. None: a batch norm in training mode is an error.
        strategy: ``ddp``: each rank holds whole models. ``fsdp``: each rank holds a shard of every
            parameter, of its gradient and of the optimizer's state, for models that do not fit
            otherwise. A pass gathers the parameters of a few blocks at a time.
        wire: format in which ranks send gradients, as ``--wire`` of ``motley train``.
        precision: precision in which :meth:`Lab.autocast` computes: fp32, bf16, fp16, or auto for
            the fastest precision of each device.
        seed: seed of the random numbers of data sets and of drop-out.
        logs: folder of the records of all runs. The variable MOTLEY_LOGS overrides it.
        run: name of this run's folder in ``logs``. None: the time of the start. The variable
            MOTLEY_RUN overrides it, and ``keep_training.sh`` sets this variable.
        allow: checks to skip. ``batch_norm`` accepts batch norms whose statistics depend on the
            shares.

    Raises:
        MotleyError: the script has joined already, or has a process group of its own.
    """
    from motley.library.lab import Lab
    from motley.library.loop_state import LoopState
    from motley.library.rank_loop import RankLoop
    from motley.library.refusals import check_allowed
    from motley.library.sample_order import kept_random_state
    from motley.library.session import Session, check_joinable, is_alone

    if _LABS:
        raise MotleyError(
            "motley.join() was called twice in one process: keep the lab that the first call "
            "returned"
        )
    check_joinable()
    check_allowed(allow)
    text = os.environ.get(SHARES)
    logs, run = os.environ.get(LOGS, logs), os.environ.get(RUN, run)
    given = read_shares(text) if text else None
    if shares is not None:
        listed = shares if isinstance(shares, str) else ",".join(map(str, shares))
        given = replace(read_shares(listed), flag="motley.join(shares=...) or MOTLEY_SHARES,")
    if micro_batch is not None and micro_batch < 1:
        raise MotleyError(f"micro_batch={micro_batch} is below 1 row: give 1 or more")
    strategy = strategy.lower()
    if strategy not in STRATEGIES:
        raise MotleyError(f"strategy={strategy!r}: give {' or '.join(STRATEGIES)}")
    if bn_group is not None and not 1 <= bn_group <= (micro_batch or bn_group):
        raise MotleyError(
            f"bn_group={bn_group} is out of range: give 1 row or more, and at most "
            f"micro_batch={micro_batch}"
        )
    alone = is_alone() and given is None and micro_batch is None and bn_group is None
    loop, state = None, LoopState()
    if not alone:
        with kept_random_state():  # the measurement of a device's precision draws numbers
            session = Session(precision)
        loop = RankLoop(session, given, micro_batch, bn_group, wire, seed, (logs, run), state,
                        strategy)  # fmt: skip
    _LABS.append(Lab(loop, state, (logs, run), allow))
    return _LABS[0]
