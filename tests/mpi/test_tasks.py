"""Any task is exact: samples of unequal weight and cost, on any ranks, through any engine."""

import json
import re

import pytest
from jobs import Jobs, Trained
from project import DDP, ROOT, ZERO

pytestmark = pytest.mark.mpi

FAILING = "tests/support/drivers/failing.py"
OUTLIER = ROOT / "tests" / "support" / "outlier.py"
STEPS = ("--max-steps", 20, "--precision", "fp32", "--clip-grad", 1.0, "--warmup-epochs", 0)
TEXT = ("--task", "text", "--paragraphs", "--depth", 2, "--width", 32, "--batch-size", 32,
        "--length", 48, "--eval-samples", 30)  # fmt: skip
IDLE = ("--shares", "5,0,3")
RUNS = {
    "DDP": (3, DDP, *IDLE),
    "as planned": (3, DDP, "--hosts", "all"),
    "micro-batches, recomputed": (3, DDP, *IDLE, "--micro-batch", 7, "--grad-checkpointing"),
    "a loss scale": (2, DDP, "--shares", "3,1", "--loss-scale", "2^12"),
    "FSDP": (3, DDP, *IDLE, "--strategy", "fsdp", "--micro-batch", 9),
    "DeepSpeed 0": (3, ZERO, *IDLE),
    "DeepSpeed 1": (3, ZERO, *IDLE, "--stage", 1, "--loss-scale", "2^12"),
    "DeepSpeed 2": (3, ZERO, *IDLE, "--stage", 2, "--micro-batch", 9),
    "DeepSpeed 3": (3, ZERO, *IDLE, "--stage", 3),
}


@pytest.fixture(scope="module")
def alone(module_jobs: Jobs) -> Trained:
    """One rank, the whole batch at once."""
    return module_jobs.train(1, DDP, "alone", *TEXT, *STEPS)


@pytest.mark.turns
@pytest.mark.parametrize("name", RUNS)
def test_paragraphs_of_any_length_are_learnt_as_by_one_rank(
    module_jobs: Jobs, alone: Trained, name: str
) -> None:
    ranks, script, *options = RUNS[name]
    run = module_jobs.train(ranks, script, name, *TEXT, *STEPS, *options)
    assert run.losses == pytest.approx(alone.losses, rel=2e-6)
    assert run.losses[-1] < 0.95 * run.losses[0]
    # The first gradient; later ones part by more than losses do, since AdamW takes a whole step
    # even where the gradient of a rare token is next to nothing, and of either sign.
    first = [each.steps()[0]["grad_norm"] for each in (run, alone)]
    assert first[0] == pytest.approx(first[1], rel=1e-6)
    weights = [[step["weight"] for step in each.steps()] for each in (run, alone)]
    assert weights[0] == weights[1] and len(set(weights[0])) > 10, "tokens differ from step to step"
    ends = [each.run["result"]["bits_per_byte"] for each in (run, alone)]
    assert ends[0] == pytest.approx(ends[1], rel=1e-5)


@pytest.fixture(scope="module")
def conversations(
    module_jobs: Jobs, tmp_path_factory: pytest.TempPathFactory
) -> tuple[tuple[object, ...], Trained]:
    """Words that train on packed conversations, and one rank's run."""
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    path.write_text("".join(
        json.dumps({"messages": [
            {"role": "user", "content": f"{n} and {n * n % 97}"},
            {"role": "assistant", "content": f"{n + n * n % 97}{'.' * (n % 9)}"},
        ]}) + "\n" for n in range(400)
    ))  # fmt: skip
    words = ("--task", "text", "--text", path, "--chat", "--pack", "--depth", 2, "--width", 32,
             "--batch-size", 16, "--length", 160, "--max-steps", 8, *STEPS[2:])  # fmt: skip
    return words, module_jobs.train(1, DDP, "chats alone", *words)


@pytest.mark.turns
@pytest.mark.parametrize("name", ["DDP", "micro-batches, recomputed", "FSDP", "DeepSpeed 2",
                                  "DeepSpeed 3", "five ranks"])  # fmt: skip
def test_packed_conversations_are_learnt_as_by_one_rank(
    module_jobs: Jobs, conversations: tuple[tuple[object, ...], Trained], name: str
) -> None:
    words, one = conversations
    five = (5, DDP, "--shares", "3,0,1,2,1")
    ranks, script, *options = RUNS.get(name, five)
    run = module_jobs.train(ranks, script, f"chats {name}", *words, *options)
    assert run.losses == pytest.approx(one.losses, rel=2e-6) and len(run.losses) == 8
    weights = [[step["weight"] for step in each.steps()] for each in (run, one)]
    assert weights[0] == weights[1] and len(set(weights[0])) > 4, "answers differ in length"
    ends = [each.run["result"]["bits_per_byte"] for each in (run, one)]
    assert ends[0] == pytest.approx(ends[1], rel=1e-5)


def test_a_model_writes_while_it_learns_and_learns_the_same(module_jobs: Jobs) -> None:
    words = ("--task", "text", "--tokens", "characters", "--depth", 1, "--width", 16,
             "--batch-size", 8, "--length", 12, "--shares", "5,0,3", "--max-steps", 5,
             *STEPS[2:])  # fmt: skip
    silent = module_jobs.train(3, DDP, "silent", *words, "--dropout", 0.1)
    writes = ("--sample-every", 2, "--sample-prompt", "The ", "--sample-length", 30)
    run = module_jobs.train(3, DDP, "writes", *words, "--dropout", 0.1, *writes)
    assert run.losses == silent.losses and len(run.losses) == 5
    events = [event for event in run.events if event["event"] == "sample"]
    assert [event["step"] for event in events] == [2, 4]
    texts = re.split(r"--- step \d ---\n", (run.folder / "samples.txt").read_text())[1:]
    assert [len(text) for text in texts] == [4 + 30 + 1] * 2 and texts[0] != texts[1]
    for event, text in zip(events, texts, strict=True):
        assert text.startswith("The ") and event["text"].endswith(text.removesuffix("\n"))
    timed = module_jobs.train(3, DDP, "timed", *words, "--sample-every", "1h")
    assert len(timed.losses) == 5 and not (timed.folder / "samples.txt").exists()
    for options, says in (
        ((*writes, "--strategy", "fsdp"), "--sample-every needs the whole model on rank 0"),
        (("--sample-every", 2, "--sample-prompt", "☃"), "--sample-prompt has characters that are"),
    ):
        done = module_jobs.fork(2, DDP, *words, *options, "--shares",
                                "1,1", "--logs", module_jobs.logs, "--run", "none")  # fmt: skip
        assert done.code != 0 and says in done.output


@pytest.mark.turns
@pytest.mark.parametrize("options", [
    (DDP,), (DDP, "--strategy", "fsdp"), (ZERO, "--stage", 2), (ZERO, "--stage", 3),
], ids=["DDP", "FSDP", "DeepSpeed 2", "DeepSpeed 3"])  # fmt: skip
def test_a_rank_with_nothing_to_do_is_not_heard_whatever_it_computes(
    module_jobs: Jobs, options: tuple[object, ...]
) -> None:
    script, *rest = options
    words = ("--task", OUTLIER, "--data-fraction", 0.05, "--seed", 1, "--batch-size", 10,
             "--epochs", 2, "--eval-samples", 3, "--shares", "1,0")  # fmt: skip
    name = " ".join(map(str, rest)) or "ddp"
    run = module_jobs.train(2, script, f"outlier {name}", *words, *rest)
    assert not any(step["overflow"] for step in run.steps())
    assert run.losses[-1] < 0.9 * run.losses[0]


# Of the mean of an evaluation, to that of exact steps in fp32.
INEXACT = {
    "16 bits": (0.98, 1.02, 3, DDP, "--precision", "fp16,bf16,fp32", "--loss-scale", "2^12"),
    "16 bits, FSDP": (0.98, 1.02, 2, DDP, "--precision", "bf16,fp16", "--strategy", "fsdp"),
    "16 bits, DeepSpeed": (0.98, 1.02, 3, ZERO, "--precision", "fp16,bf16,fp32", "--stage", 1),
    "PowerSGD": (0.98, 1.04, 3, DDP, "--wire", "powersgd:4"),
    "local steps": (0.98, 1.08, 3, DDP, "--wire", "local:4"),
    "PowerSGD, 16 bits": (0.98, 1.04, 2, DDP, "--wire", "powersgd:4", "--precision", "bf16,fp16"),
    "local, 16 bits": (0.98, 1.08, 2, DDP, "--wire", "local:4", "--precision", "bf16,fp16"),
}
FAR = (*TEXT, "--max-steps", 100, "--lr", 0.003, "--clip-grad", 1.0, "--warmup-epochs", 0)


@pytest.fixture(scope="module")
def far(module_jobs: Jobs) -> Trained:
    """One rank in fp32, until it has learnt something."""
    return module_jobs.train(1, DDP, "far", *FAR, "--precision", "fp32")


@pytest.mark.turns
@pytest.mark.parametrize("name", INEXACT)
def test_paragraphs_are_learnt_as_well_in_16_bits_and_by_an_inexact_wire(
    module_jobs: Jobs, far: Trained, name: str
) -> None:
    least, most, ranks, script, *options = INEXACT[name]
    shares = "5,3" if ranks == 2 else "5,0,3"
    run = module_jobs.train(ranks, script, name, *FAR, *options, "--shares", shares,
                            "--save-every", 25)  # fmt: skip
    assert far.run["result"]["loss"] < 0.5 * far.losses[0]
    assert least < run.run["result"]["loss"] / far.run["result"]["loss"] < most
    assert run.losses != far.losses
    if "16 bits" in name and "--wire" not in options:
        assert run.losses[:10] == pytest.approx(far.losses[:10], rel=2e-3)
    # All say the same; and each checkpoint compares the hash of their parameters.
    ends = [[step["loss"] for step in run.steps(rank)] for rank in range(ranks)]
    assert all(losses == ends[0] for losses in ends)
    assert not [event for event in run.events if event["event"] == "drift"]


TYPES = ("--task", ROOT / "tests" / "support" / "many_types.py", "--opt", "sgd", "--batch-size", 32,
         "--precision", "fp32", "--max-steps", 3, "--warmup-epochs", 0)  # fmt: skip


def test_parameters_of_several_types_are_learnt_or_refused_by_name(module_jobs: Jobs) -> None:
    alone = module_jobs.train(1, DDP, "types", *TYPES, "--lr", 0.01)
    shares = ("--shares", "5,3")
    for way in (shares, ("--hosts", "all"), (*shares, "--wire", "local:1")):
        run = module_jobs.train(2, DDP, f"types {way}", *TYPES, "--lr", 0.01, *way)
        assert run.losses == pytest.approx(alone.losses, rel=1e-2)  # some weights have 8 bits
        assert not [event for event in run.events if event["event"] == "drift"]
    for says, script, *options in (
        ("turned has the type complex64: take --strategy ddp", DDP, "--strategy", "fsdp"),
        ("wide has the type float64: take torch_dist/train_vit.py", ZERO, "--stage", 1),
        ("wide has the type float64: take --wire exact", DDP, "--wire", "powersgd:4"),
    ):
        run_name = ("--logs", module_jobs.logs, "--run", f"types {options}")
        done = module_jobs.fork(2, script, *TYPES, *run_name, *shares, *options)
        assert done.code != 0 and says in done.output, done.output


def test_gradients_that_arrive_in_another_order_on_each_rank_are_added_right(
    module_jobs: Jobs,
) -> None:
    words = ("--task", ROOT / "tests" / "support" / "branches.py", "--batch-size", 32,
             "--precision", "fp32", "--max-steps", 5, "--warmup-epochs", 0)  # fmt: skip
    alone = module_jobs.train(1, DDP, "branches", *words)
    for script, *options in ((DDP,), (ZERO, "--stage", 1), (ZERO, "--stage", 2)):
        name = f"branches {len(options)} {options[-1:]}"
        run = module_jobs.train(2, script, name, *words, "--shares", "5,3", *options)
        assert run.losses == pytest.approx(alone.losses, rel=2e-6), name


EXPERTS = ("--task", ROOT / "tests" / "support" / "experts.py", "--batch-size", 8,
           "--precision", "fp32", "--warmup-epochs", 0, "--lr", 0.01, "--weight-decay", 0.5,
           "--clip-grad", 1.0)  # fmt: skip
WAYS = {
    "two ranks": (2, "--shares", "5,3"),
    "as planned": (2, "--hosts", "all"),
    "an idle rank, micro-batches": (3, "--shares", "2,0,1", "--micro-batch", 2),
}


@pytest.fixture(scope="module")
def experts(module_jobs: Jobs) -> Trained:
    """One rank, the whole batch at once."""
    return module_jobs.train(1, DDP, "experts", *EXPERTS, "--max-steps", 30)


@pytest.mark.parametrize("way", WAYS)
def test_an_expert_that_no_sample_chose_is_left_alone_as_on_one_machine(
    module_jobs: Jobs, experts: Trained, way: str
) -> None:
    ranks, *options = WAYS[way]
    module_jobs.train(ranks, DDP, f"experts {way}", *EXPERTS, *options, "--max-steps", 20)
    run = module_jobs.train(ranks, DDP, f"experts {way}", *EXPERTS, *options, "--max-steps", 30,
                            "--resume", "auto")  # fmt: skip
    assert run.losses == pytest.approx(experts.losses, rel=1e-4)
    norms = [[step["grad_norm"] for step in each.steps()] for each in (run, experts)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
    assert not [event for event in run.events if event["event"] == "drift"]


def test_local_steps_average_experts_and_who_shards_names_them(module_jobs: Jobs) -> None:
    words = (*EXPERTS, "--max-steps", 9, "--shares", "5,3", "--batch-size", 4)
    run = module_jobs.train(2, DDP, "experts local", *words, "--wire", "local:3", "--save-every", 3)
    assert len(run.losses) == 9
    assert not [event for event in run.events if event["event"] == "drift"]
    for script, *options in (
        (DDP, "--strategy", "fsdp"),
        (ZERO, "--stage", 0),
        (ZERO, "--stage", 1),
    ):
        place = ("--logs", module_jobs.logs, "--run", f"experts {options}")
        done = module_jobs.fork(2, script, *words, *place, *options)
        assert done.code != 0 and "experts.0.weight" in done.output, done.output
        assert "Take torch_dist/train_vit.py --strategy ddp" in done.output, done.output


LATE = (*EXPERTS, "--late", "--max-steps", 9)


@pytest.mark.turns
@pytest.mark.parametrize("options", [
    (DDP,), (DDP, "--strategy", "fsdp"), (ZERO, "--stage", 0), (ZERO, "--stage", 1),
], ids=["DDP", "FSDP", "DeepSpeed 0", "DeepSpeed 1"])  # fmt: skip
def test_an_absence_that_the_first_samples_do_not_show_is_named_when_it_comes(
    jobs: Jobs, options: tuple[object, ...]
) -> None:
    script, *rest = options
    done = jobs.fork(2, script, *LATE, "--shares", "5,3", *rest, "--logs", jobs.logs, "--run", "r")
    assert done.code != 0 and done.seconds < 60
    assert "Set sometimes_unused = True in the class ExpertsTask" in done.output, done.output


def test_a_task_that_says_so_trains_as_one_rank(module_jobs: Jobs) -> None:
    alone = module_jobs.train(1, DDP, "late alone", *LATE)
    run = module_jobs.train(2, DDP, "late", *LATE, "--shares", "5,3", "--sometimes-unused")
    assert run.losses == pytest.approx(alone.losses, rel=1e-5)


@pytest.mark.parametrize(
    "task",
    [(*TEXT, *STEPS), ("--task", "examples/my_task.py", "--max-steps", 20, "--warmup-epochs", 0)],
    ids=["text", "a task of one's own"],
)
def test_a_killed_run_goes_on_elsewhere_through_the_other_engine(
    jobs: Jobs, task: tuple[object, ...]
) -> None:
    whole = jobs.train(1, DDP, "whole", *task)
    words = (*task, "--epochs", 30, "--save-every", 4, "--logs", jobs.logs, "--run", "killed")
    first = jobs.fork(2, FAILING, "--fail", "killed", "--step", 11, *words, "--shares", "2,1")
    assert first.code != 0 and "died without a message" in first.output
    rest = ("--resume", "auto", "--stage", 1, "--shares", "1,0,3")
    then = jobs.train(3, ZERO, "killed", *task, *rest)
    (resumed,) = [event for event in then.events if event["event"] == "resume"]
    assert "step 11" in str(resumed), resumed  # no finished step is lost
    assert then.losses == pytest.approx(whole.losses, rel=2e-6) and len(then.losses) == 20
    assert then.run["result"]["loss"] == pytest.approx(whole.run["result"]["loss"], rel=2e-6)
    assert then.losses[-1] < 0.95 * then.losses[0]


def test_a_tasks_options_and_title_are_in_the_records(jobs: Jobs) -> None:
    task = ("--task", "examples/my_task.py", "--digits", 3, "--max-steps", 1)
    run = jobs.train(1, DDP, "mine", *task).run
    assert run["task"]["title"] == "task Sums" and run["config"]["digits"] == 3
