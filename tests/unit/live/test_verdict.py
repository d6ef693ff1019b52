"""What a run reached, where the rest of a step went, and what would be faster: from its records."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from forked import run_script
from small_runs import START, write_run

from motley.live.verdict import run_verdict
from motley.plan.advice import Advice
from motley.plan.speeds import Flow, Links
from motley.records.costs import read_training
from motley.records.run_folder import RunFolder


def verdict(run: RunFolder) -> tuple[list[str], dict[str, Any]]:
    found = run_verdict(read_training(run))
    return found.sentences(), found.as_json()


def planned(run: RunFolder, step_s: float = 0.155, compute_s: float = 0.1) -> None:
    """40 samples a step, of which the machines could do 400 a second."""
    forecast = {"global_batch": 40, "limit_s": 0.1, "step_s": step_s, "compute_s": [compute_s, 0.1]}
    run.update_run(plan={"wire": "exact", "forecast": forecast})


def test_what_is_known_is_said_and_nothing_else(tmp_path: Path) -> None:
    bare = write_run(tmp_path / "bare")
    sentences, found = verdict(bare)
    assert sentences[0] == "A step took 0.158 s." and found["fraction"] is None
    assert sentences[1:] == [
        "The rest of a step went to: 19% the wire, 13% waiting for a (rank 0), 3% the optimizer."
    ]
    sentences, _ = verdict(write_run(tmp_path / "untold", known=False))
    assert "waiting" not in " ".join(sentences)


def test_the_limit_who_is_slower_than_measured_and_the_slow_link(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    planned(run, step_s=0.1, compute_s=0.05)
    flows = {(a, b): Flow(1e6 if b == 1 else 1e8, 1e-3) for a in range(3) for b in range(3)
             if a != b}  # fmt: skip
    run.update_run(links=Links(dict(enumerate("abc")), flows).as_json())
    sentences, found = verdict(run)
    assert found["fraction"] == pytest.approx(253 * 0.1 / 40)
    assert sentences[0] == (
        "The run reached 63% of the limit, the sum of all devices. A step took 0.158 s (0.1 "
        "expected)."
    )
    assert "the wire (b's link carries" in sentences[1] and "when it receives" in sentences[1]
    slower = "a (rank 0) takes 2.10 times as long as at the start for the same samples: "
    assert (
        sentences[2]
        == f"{slower}another program uses the machine, or the machine has become slower."
    )
    ranks = [{"rank": rank, "host": "a", "uuid": ""} for rank in range(3)]
    run.update_run(ranks=ranks, facts=[{"host": "a", "cores": 2}])
    assert verdict(run)[0][2].startswith(f"{slower}3 ranks share 2 processors on this machine; ")
    run.update_run(facts=[{"host": "a", "cores": 3}])
    assert verdict(run)[0][2] == sentences[2]
    late = write_run(tmp_path / "late")
    planned(late, step_s=0.1, compute_s=0.05)
    steps = late.step_file(0)
    steps.write_text(steps.read_text().replace('"t_data": 0.001', '"t_data": 0.2'))
    assert "for the same samples: most of that time goes to reading its samples; try" in " ".join(
        verdict(late)[0]
    )
    planned(run)
    sentences, _ = verdict(run)
    assert len(sentences) == 2 and "expected" not in sentences[0]
    forecast = {"global_batch": 40, "limit_s": 0.3, "step_s": 0.35}  # others used them
    run.update_run(plan={"wire": "exact", "forecast": forecast})
    assert verdict(run)[0][0] == (
        "A step took 0.158 s (0.35 expected), which is 1.90 times the speed that was measured at "
        "the start. Other programs may have used the machines then."
    )


def test_what_would_be_faster_comes_by_its_gain_with_its_price(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    told = (
        Advice("slow", "--hosts a", 1.2), Advice("the model cannot be compiled"),
        Advice("few bytes", "--wire powersgd:8", 1.5, "it is inexact"),
    )  # fmt: skip
    run.update_run(advice=[each.as_json() for each in told])
    sentences, found = verdict(run)
    assert sentences[2:] == [
        "--wire powersgd:8: about +50% images/s; it is inexact.",
        "--hosts a: about +20% images/s.",
        "the model cannot be compiled.",
    ]
    assert [each["times"] for each in found["advice"]] == [1.5, 1.2, None]
    planned(run, step_s=0.4)
    assert "(rough: this plan erred by a factor of 2.5); it is" in " ".join(verdict(run)[0])
    run.update_run(advice=[{"of": "another version"}])
    assert verdict(run)[1]["advice"] == []


def test_a_run_that_went_on_is_judged_by_its_last_launch(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    for rank in range(2):
        with run.steps(rank) as lines:  # twice as slow as before
            for step in range(60, 70):
                lines.write({
                    "step": step, "epoch": 3, "n_local": 20, "n_global": 40, "t_data": 0.001,
                    "t_compute": 0.3, "t_wait": 0.0, "t_comm": 0.011, "t_opt": 0.008,
                    "mem_peak_mib": 400.0, "samples_per_s": 125.0, "weight": 128.0,
                    "time": START + 100 + 0.32 * (step - 60) - 200 * rank,  # its clock is late
                })  # fmt: skip
    run.update_run(started=START + 90)
    sentences, _ = verdict(run)
    assert sentences == ["A step took 0.32 s.", "The rest of a step went to: 3% the wire, 2% the "
                         "optimizer."]  # fmt: skip
    run.update_run(started=START + 1000)  # it has taken none
    assert verdict(run)[0][0].startswith("A step took 0.15")


def test_a_report_of_one_run_opens_with_it(tmp_path: Path) -> None:
    run = write_run(tmp_path / "logs" / "run")
    planned(run)
    done = run_script("plots/report.py", tmp_path / "logs", "--out", tmp_path / "x" / "y")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "x" / "y" / "report.html").read_text()
    assert '<p class="lead">The run reached 63% of the limit' in page


def test_a_difference_of_some_ms_between_ranks_on_cpus_is_no_finding(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")  # each rank takes 0.105 s
    planned(run, compute_s=0.09)
    sentences, found = verdict(run)
    assert found["slower_times"] == pytest.approx(0.105 / 0.09)
    assert not [each for each in sentences if "at the start" in each]
    ranks = [{"rank": 0, "host": "a", "uuid": "GPU-1"}, {"rank": 1, "host": "b", "uuid": "GPU-2"}]
    run.update_run(ranks=ranks)  # whose times are exact
    assert "a (rank 0) takes 1.17 times as long as at the start" in " ".join(verdict(run)[0])
    fsdp = write_run(tmp_path / "fsdp", known=False)  # a pass waits for all ranks
    planned(fsdp, compute_s=0.05)
    assert verdict(fsdp)[1]["slower_times"] is None


def test_energy_and_memory_that_grows_are_told(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    run.update_run(ranks=[{"rank": 0, "host": "a", "uuid": "GPU-1"}])
    log = run.gpu_log("a")
    for second in range(12):
        log.write({"Timestamp": START + second, "Rank": 0, "GPU_ID": 0, "Host": "a",
                   "GPU_UUID": "GPU-1", "Power_W": 200.0})  # fmt: skip
    log.close()
    training = read_training(run)
    found = run_verdict(training, co2_per_kwh=100.0)
    assert found.energy is not None
    seconds = sum(40 / (250 + step % 7) for step in range(60))
    assert found.energy.kwh == pytest.approx(200 * seconds / 3.6e6)
    assert found.energy.co2_kg == pytest.approx(found.energy.kwh / 10)
    assert found.energy.joules_each == pytest.approx(200 * seconds / (60 * 128))
    assert "took 0.527 Wh, 0.247 J per image: 0.0527 g" in found.sentences()[-1]
    assert run_verdict(training, co2_per_kwh=None).energy is None
    assert found.grows_mib is None
    for records in training.steps.values():
        for number, line in enumerate(records):
            line["mem_peak_mib"] = 400.0 + 2 * number
    growing = run_verdict(training)
    assert growing.grows_mib == pytest.approx(2.0)
    assert "Memory grows by 2 MiB per step until the end of the run." in growing.sentences()


def test_after_a_new_split_each_rank_is_held_against_the_samples_that_it_has(
    tmp_path: Path,
) -> None:
    run = write_run(tmp_path / "run")  # 20 samples of each rank in 0.105 s
    speeds = [
        {
            "sizes": [1, 64],
            "seconds": [0.105 / 20, 64 * 0.105 / 20],
            "step_s": 0.0,
            "memory_mib": [],
        }
    ] * 2
    forecast = {"global_batch": 40, "limit_s": 0.1, "step_s": 0.1, "compute_s": [0.0525, 0.1575]}
    run.update_run(
        plan={"wire": "exact", "forecast": forecast, "speeds": speeds, "counts": [10, 30]}
    )
    _, found = verdict(run)
    assert found["slower_times"] == pytest.approx(1.0)  # rank 0 has twice its first share


def test_steps_of_local_sgd_are_judged_by_their_mean(tmp_path: Path) -> None:
    """One step in eight waits for the wire: the machines are used for half of the time."""
    training = read_training(write_run(tmp_path / "run"))

    def local(line: dict[str, Any]) -> dict[str, Any]:
        comm = 0.8 * (line["step"] % 8 == 7)
        parts = {"t_data": 0.0, "t_compute": 0.1, "t_wait": None, "t_comm": comm, "t_opt": 0.0}
        return {**line, **parts, "samples_per_s": line["n_global"] / (0.1 + comm)}

    steps = {rank: [local(line) for line in lines][:58] for rank, lines in training.steps.items()}
    plan = {"wire": "local:8", "forecast": {"global_batch": 40, "limit_s": 0.1}}
    about = {**training.run, "plan": plan}
    found = run_verdict(replace(training, run=about, steps=steps, lead=steps[0]), None)
    assert found.step_s == pytest.approx(0.2)
    assert found.lost["the wire"] == pytest.approx(0.5)
    assert found.fraction == pytest.approx(0.5)
