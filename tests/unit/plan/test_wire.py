"""What travels between ranks: modes that are asked for, their sizes, and what they do to a run."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from project import ROOT
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import _should_compress
from torch.nn.parallel import DistributedDataParallel

from motley.comm.modes import local_sgd, modes, parse_wire, power_sgd
from motley.comm.modes.local_sgd import LocalSgd
from motley.comm.modes.numbers import BF16, EXACT, FP16
from motley.comm.modes.power_sgd import PowerSgd
from motley.comm.reducer import make_buckets
from motley.errors import MotleyError
from motley.measure.link_speed import _tensors
from motley.measure.measured_plan import _best_mode
from motley.plan.advice import Advice, better_engine, better_modes, fewer_hosts, larger_batch
from motley.plan.forecast import Choice, choose_machines, forecast, split_and_forecast
from motley.plan.speeds import Flow, Links, SpeedTable
from motley.plan.wire import AllReduceCost, EngineTraits
from motley.tasks.classifiers import vit_digits

OFFERED = PowerSgd()

TEAM = (SpeedTable((1, 8), (0.01, 0.08), 0.001), SpeedTable((1, 8), (0.02, 0.16), 0.001))


@pytest.mark.parametrize(
    "text",
    ["exact", "bf16", "fp16", "powersgd:1", "powersgd:32", "local:4", "exact/leaf4", "fp16/leaf0",
     "powersgd:4+bf16"],
)  # fmt: skip
def test_a_mode_is_written_as_it_is_read(text: str) -> None:
    assert str(parse_wire(text)) == text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("bf61", "nearest: bf16"), ("powersdg:4", "nearest: powersgd"), ("", "choose auto"),
        ("powersgd", "as in powersgd:8"), ("powersgd:0", "1 or more"), ("powersgd:-1", "1 or more"),
        ("powersgd:4.5", "1 or more"), ("powersgd:4+fp16", "or powersgd:8.bf16"),
        ("powersgd:0+bf16", "1 or more"), ("powersgd:+bf16", "1 or more"),
        ("local:4+bf16", "1 or more"), ("bf16+fp16", "choose auto"),
        ("powersgd:4+bf16/leaf1", "as in exact/leaf4"),
        ("local", "as in local:4"), ("local:0", "1 or more"),
        ("lokal:4", "nearest: local"), ("local:4/leaf1", "as in exact/leaf4"),
        ("fp16:2", "write --wire fp16"),
        ("powersgd:4/leaf1", "as in exact/leaf4"), ("exact/leaf", "as in exact/leaf4"),
    ],
)  # fmt: skip
def test_a_mode_that_is_none_is_answered_with_what_is_one(text: str, says: str) -> None:
    with pytest.raises(MotleyError, match=says):
        parse_wire(text)


def test_auto_rounds_the_wire_only_where_a_rank_rounds_anyway() -> None:
    assert parse_wire("auto") is None
    for precisions, offered, free in (
        (("fp32", "tf32"), ["exact", "bf16", "powersgd:8"], {"exact"}),
        (("fp32", "bf16"), ["exact", "bf16", "powersgd:8+bf16"], {"exact", "bf16"}),
        (("bf16", "fp16", "fp32"), ["exact", "fp16", "powersgd:8+bf16"], {"exact", "fp16"}),
    ):
        found = [mode for kind in modes().values() for mode in kind.offers(precisions, 99.0)]
        assert [str(mode) for mode in found] == offered
        assert {str(mode) for mode in found if mode.is_free(precisions)} == free
    assert LocalSgd.offers((), 0.1) == [LocalSgd(2)] and LocalSgd.offers((), 3) == [LocalSgd(4)]
    assert str(OFFERED.in_job(("fp32", "fp16"))) == "powersgd:8+bf16"
    for mode in (EXACT, BF16, LocalSgd(2), PowerSgd(4, rounded=True)):
        assert mode.in_job(("fp32", "bf16")) == mode
    assert OFFERED.in_job(("fp32", "tf32")) == OFFERED
    assert LocalSgd(1).in_job(()) == EXACT and not LocalSgd(1).is_inexact


@given(
    st.lists(st.lists(st.integers(1, 200), min_size=1, max_size=3), min_size=1),
    st.integers(1, 40),
)
def test_powersgd_sends_what_torchs_hook_says_that_it_sends(
    shapes: list[list[int]], rank: int
) -> None:
    numbers = 0
    for shape in shapes:
        high, wide = shape[0], math.prod(shape[1:])
        thin, before, after = _should_compress(high, wide, min(high, wide, rank), 2)
        numbers += after if thin else before
    power = PowerSgd(rank)
    assert power.count_bytes(shapes) == 4 * numbers
    assert replace(power, rounded=True).count_bytes(shapes) == 2 * numbers
    whole = EXACT.count_bytes(shapes)
    assert BF16.count_bytes(shapes) * 2 == whole >= power.count_bytes(shapes)


@given(st.lists(st.integers(1, 50), min_size=1), st.integers(1, 100))
def test_buckets_hold_every_number_once(sizes: list[int], most: int) -> None:
    buckets = make_buckets([torch.empty(size, 2) for size in sizes], most)
    assert sum(len(bucket.flat) for bucket in buckets) == 2 * sum(sizes)
    assert [bucket.place for bucket in buckets] == list(range(len(buckets)))
    assert [bucket.final for bucket in buckets] == [False] * (len(buckets) - 1) + [True]
    for bucket in buckets:
        bucket.flat.zero_()
        assert not any(bool(grad.any()) for grad in bucket.grads)  # views
        assert len(bucket.flat) <= most or len(bucket.grads) == 1


@given(st.integers(2, 16), st.floats(0.0, 100.0))
def test_local_steps_hide_the_wire_behind_those_between_two_meetings(every: int, s: float) -> None:
    wire = AllReduceCost(0.0, s, sync_every=every)
    both = [
        forecast((80, 40), TEAM, each) for each in (wire, replace(wire, overlaps=False))
    ]  # of 0.801 s
    shown = [max(0.0, s - every * 0.801) / every, s / every]
    assert [each.exposed_s for each in both] == pytest.approx(shown)
    assert both[0].wire_s == pytest.approx(s / every) and both[0].fraction <= 1 + 1e-9


@given(st.lists(st.integers(1, 40_000), min_size=1, max_size=30), st.integers(2, 32))
def test_buckets_are_forecast_as_ddp_fills_them(sizes: list[int], buckets: int) -> None:
    tensors = [torch.empty(size, device="meta") for size in sizes]
    total = sum(sizes)
    filled, _ = dist._compute_bucket_assignment_by_size(tensors, [math.ceil(4 * total / buckets)])
    parts = [sum(sizes[place] for place in bucket) / total for bucket in filled]
    wire = AllReduceCost(0.001, 0.1, tensors=tuple((size / total, size / total) for size in sizes))
    assert [sent for _, sent in wire._cut(buckets)] == pytest.approx(parts)
    # The last bucket is ready when the backward pass is done; no bucket waits for nothing.
    exposed = wire.exposed(buckets, 0.2)
    assert 0.001 + 0.1 * parts[-1] <= exposed * (1 + 1e-9)
    assert exposed <= (1 + 1e-9) * wire.seconds(len(parts))


def test_zero_sends_more_and_what_sends_less_is_said() -> None:
    # 120 samples are 10 micro-batches of 8 on the faster rank, of 0.08 s, and 5 on the other.
    group, wire = TEAM, AllReduceCost(0.0, 0.2)
    zero = [
        replace(wire, overlaps=False, allreduces_per_step=o, allreduces_per_micro_step=e)
        for o, e in ((1, 0), (1.5, 0), (0.5, 1))
    ]
    shown = [forecast((80, 40), group, each).exposed_s for each in zero]
    assert shown == pytest.approx([0.2, 0.3, 0.1 + 10 * 0.2])
    # Where each micro-batch sends, few and long ones are worth being slower.
    steep = tuple(
        SpeedTable((1, 8, 80), (0.1 * t, 0.08 * t, 0.85 * t), 0.0, preferred=8) for t in (1, 2)
    )
    long, *_, found = split_and_forecast(120, steep, zero[2])
    assert max(speed.micro_batch for speed in long) == 80 and found.exposed_s < 0.5
    assert split_and_forecast(120, steep, zero[0])[0] == steep

    # Parameters are gathered in fp32, whatever the gradients travel in.
    stage1 = EngineTraits(False, gathers_per_step=0.5, words="stage 1 sends twice")
    assert [stage1.through(wire, mode).allreduces_per_step for mode in (EXACT, BF16)] == [1.5, 2.0]
    assert not stage1.through(wire, EXACT).overlaps and EngineTraits().through(wire, EXACT) == wire
    # As long as fp32 was measured to take, if that is known: fewer bytes may be faster each.
    faster = replace(wire, transfer_s=0.08)
    assert stage1.through(faster, BF16, exact=wire).allreduces_per_step == 1 + 0.5 * 0.2 / 0.08
    assert stage1.through(wire, EXACT, exact=wire).allreduces_per_step == 1.5
    # What is not trained has no gradient, and is gathered with the rest.
    stage3 = EngineTraits(
        allreduces_per_step=0, allreduces_per_micro_step=0.5, gathers_per_micro_step=1
    )
    lora = replace(wire, frozen=99.0)
    sent = [each.through(lora, EXACT) for each in (EngineTraits(), stage1, stage3)]
    assert [each.allreduces_per_step for each in sent] == [1, 1.5, 0]
    assert [each.allreduces_per_micro_step for each in sent] == [0, 0, 100.5]
    # In 16 bits they are half of that, where all ranks compute so.
    fsdp = replace(stage3, gathers_per_micro_step=0.5, narrow_parameters=True)
    sent = [fsdp.through(lora, mode, ("bf16", other))
            for mode in (EXACT, BF16) for other in ("bf16", "fp32")]  # fmt: skip
    assert [each.allreduces_per_micro_step for each in sent] == [25.5, 50.5, 50.5, 100.5]
    engines = {"--stage 0": forecast((80, 40), group, zero[0]),
               "torch": forecast((80, 40), group, wire)}  # fmt: skip
    (advice,) = better_engine(stage1, forecast((80, 40), group, zero[2]), engines)
    assert (
        advice.text.startswith("stage 1 sends twice, which takes 2.1 s")
        and advice.option == "torch"
    )
    assert better_engine(stage1, engines["torch"], engines) == ()
    assert better_engine(EngineTraits(), engines["torch"], {}) == ()


@pytest.mark.filterwarnings("ignore:Grad strides do not match")
def test_the_order_and_size_of_tensors_are_those_of_ddps_own_buckets(tmp_path: Path) -> None:
    found: list[float] = []

    def note(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        found.append(bucket.buffer().nbytes / 2**20)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    net = vit_digits()
    mib = sum(p.numel() for p in net.parameters()) * 4 / 2**20
    wire = AllReduceCost(0.0, 1.0, tensors=_tensors(list(net.parameters()), EXACT))
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        for buckets in (2, 3, 7, 10, 16):
            ddp = DistributedDataParallel(net, bucket_cap_mb=mib / buckets)
            ddp.register_comm_hook(None, note)
            for _ in range(2):  # after the first pass they are cut anew, as gradients came
                found.clear()
                net.zero_grad(set_to_none=True)
                ddp(torch.zeros(1, 1, 8, 8)).sum().backward()
            assert found == pytest.approx([sent * mib for _, sent in wire._cut(buckets)])
    finally:
        dist.destroy_process_group()


def test_what_would_be_faster_is_said_with_its_price() -> None:
    wires = {
        EXACT: AllReduceCost(0.0, 5.0),
        BF16: AllReduceCost(0.0, 2.5),
        OFFERED: AllReduceCost(0.0, 0.2),
    }
    options = {
        mode: choose_machines(120, [0, 1], TEAM, wire, fixed=True) for mode, wire in wires.items()
    }
    rounded, inexact = better_modes(options, EXACT, ["a", "b"])
    assert rounded.option == "--wire bf16" and "with all hosts" in rounded.text
    assert inexact.option == "--wire powersgd:8" and "lost 0.3 points of top-1" in inexact.price
    planned_s = options[EXACT].chosen.step_s
    for advice, mode in ((rounded, BF16), (inexact, OFFERED)):
        assert advice.times == pytest.approx(planned_s / options[mode].chosen.step_s)
        assert advice.price in advice.text and Advice.from_json(advice.as_json()) == advice
    assert better_modes(options, OFFERED, ["a", "b"]) == ()
    wires[EXACT] = AllReduceCost(0.0, 0.01)
    options[EXACT] = choose_machines(120, [0, 1], TEAM, wires[EXACT], fixed=True)
    assert better_modes(options, EXACT, ["a", "b"]) == ()


def test_the_price_of_a_mode_is_what_the_benchmarks_measured() -> None:
    """Of several records of a mode on the same data, the one with the most seeds counts."""
    most: dict[tuple[str, str], list[float]] = {}
    for path in (ROOT / "benchmarks" / "results").glob("accuracy_wire*.json"):
        for row in json.loads(path.read_text())["rows"]:
            assert len(row["runs"]) >= 5
            known = most.get((row["mode"], row["data"]), [])
            most[row["mode"], row["data"]] = max(known, row["differences"], key=len)
    worst: dict[str, tuple[float, int]] = {}
    for (name, _), differences in most.items():
        lost = -sum(differences) / len(differences), len(differences)
        worst[name] = max(lost, worst.get(name, lost))
    for name, (lost, seeds) in worst.items():
        mode = parse_wire(name)
        assert mode is not None
        if mode.is_inexact:
            assert mode.lost_points == (round(lost, 1), seeds)
        else:
            assert lost < 0.05
    assert {f"powersgd:{rank}" for rank in power_sgd.LOST_POINTS} <= worst.keys()
    assert {f"local:{steps}" for steps in local_sgd.LOST_POINTS} <= worst.keys()
    assert "DEAR" in PowerSgd(1).price and "DEAR" not in OFFERED.price
    assert "not measured" in LocalSgd(64).price
    assert "exact" in EXACT.price and "rounded" in BF16.price


def test_a_batch_too_small_for_the_lab_is_said_and_which_would_do() -> None:
    machines, names = [0, 1], ["a", "b"]
    wire = AllReduceCost(0.0, 1.0, overlaps=False)
    (advice,) = larger_batch(100, names, machines, TEAM, wire)  # a alone: 1.0 s
    wanted = int(advice.option.removeprefix("--batch-size "))
    assert "as a alone" in advice.text and wanted % 100 == 0
    before, after = (choose_machines(n, machines, TEAM, wire).chosen for n in (100, wanted))
    assert advice.times == pytest.approx(after.samples_per_s / before.samples_per_s)
    for samples, beats in ((wanted, True), (wanted // 2, False)):
        alone = TEAM[0].compute_seconds(samples)
        together = choose_machines(samples, machines, TEAM, wire).chosen.step_s
        assert (alone / together >= 1.1) == beats
    assert larger_batch(wanted, names, machines, TEAM, wire) == ()
    assert larger_batch(100, names, machines, TEAM, AllReduceCost(0.0, 1e9)) == ()  # none would do
    assert larger_batch(100, names, [0, 0], TEAM, wire) == ()  # one machine


def test_who_slows_all_others_is_said_where_all_were_asked_for() -> None:
    flows = {(a, b): Flow(1e6 if 1 in (a, b) else 1e8, 0.001) for a in range(3) for b in range(3)
             if a != b}  # fmt: skip
    links = Links(dict(enumerate("abc")), flows)
    machines, team = [0, 1, 2], [*TEAM, TEAM[0]]

    def ask(wire: AllReduceCost) -> tuple[Choice, tuple[Advice, ...]]:
        choice = choose_machines(120, machines, team, wire, links)
        planned_s = choice.with_all.step_s
        return choice, fewer_hosts(choice, planned_s, ["a", "b", "c"], machines, links)

    choice, (advice,) = ask(AllReduceCost(0.0, 1.4, size=1e6))
    assert choice.ranks == (0, 2) and advice.option == "--hosts a,c"
    assert advice.times == pytest.approx(choice.with_all.step_s / choice.chosen.step_s)
    assert advice.text.startswith("without b a step") and links.remark(1) in advice.text
    assert ask(AllReduceCost(0.0, 0.01))[1] == ()


def test_the_plan_takes_what_it_may_and_is_faster() -> None:
    leaf, fp16 = replace(EXACT, slow_rank=1), FP16
    seconds = {EXACT: 5.0, leaf: 3.0, fp16: 2.5, replace(fp16, slow_rank=1): 2.45, OFFERED: 0.2}
    options = {
        mode: choose_machines(120, [0, 1], TEAM, AllReduceCost(0.0, spent), fixed=True)
        for mode, spent in seconds.items()
    }
    assert _best_mode(options, None, ("fp32", "fp32")) == leaf
    assert _best_mode(options, None, ("fp16", "fp32")) == fp16  # 2 % are no reason
    assert _best_mode(options, EXACT, ("fp16", "fp32")) == leaf
    assert _best_mode(options, OFFERED, ("fp32", "fp32")) == OFFERED
    assert _best_mode({EXACT: options[EXACT]}, OFFERED, ("fp32", "fp32")) == EXACT  # one rank alone
