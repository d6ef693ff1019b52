"""A trial of the launch line, as keep_training.py reads it."""

import pytest

from motley.cluster.launcher import WITHOUT_MPI
from motley.launch.ranks import SECRET_VARIABLE
from motley.provision.launch_line import LaunchLine
from motley.provision.launch_trial import Outcome, loss_warning, read_outcome, survive_environment


def said(size: int, *alive: int) -> str:
    """The output of all ranks of a trial, with a line of the launcher's."""
    began = [f"[1,{rank}]trial: rank {rank} of {size} began\n" for rank in range(size)]
    live = [f"trial: rank {rank} of {size} lives on" for rank in alive]
    return "".join([*began, "PMIX ERROR\n", *live])


@pytest.mark.parametrize(
    ("output", "code", "outcome"),
    [
        (said(3, 1, 0), 0, Outcome.LIVE),
        (said(3, 0), 0, Outcome.END),
        (said(3), 137, Outcome.END),
        (said(1), 0, Outcome.ALONE),
        ("no such option", 1, Outcome.FAILED),
        ("", 0, Outcome.SILENT),
    ],
)
def test_the_outcome_is_read_of_what_the_ranks_print(
    output: str, code: int, outcome: Outcome
) -> None:
    assert read_outcome(output, code) is outcome


def test_a_variable_of_the_users_own_stays() -> None:
    line = LaunchLine.parse(["mpirun", "./entry_cn.sh"])
    own = survive_environment(line, {"PRTE_MCA_state_base_recoverable": "0", "HOME": "/"})
    assert own["PRTE_MCA_state_base_recoverable"] == "0" and own["HOME"] == "/"
    assert own["OMPI_MCA_orte_enable_recovery"] == "1"
    assert own["OMPI_MCA_oob_tcp_keepalive_time"] == "10"


def test_ranks_of_srun_meet_without_mpi_and_others_do_not() -> None:
    ours = {WITHOUT_MPI, SECRET_VARIABLE}
    assert survive_environment(LaunchLine(("srun", "./entry_cn.sh"), ()), {}).keys() >= ours
    assert not survive_environment(LaunchLine(("mpirun", "./entry_cn.sh"), ()), {}).keys() & ours


@pytest.mark.parametrize(
    ("outcome", "own", "cost", "fix"),
    [
        (Outcome.END, None, "up to a minute", "mpirun of setup/make_env.sh"),
        (Outcome.END, "30s", "your --save-every 30s", "mpirun of setup/make_env.sh"),
        (Outcome.ALONE, "500", "your --save-every 500", "use --save-every 50s"),
        (Outcome.SILENT, "1h", "your --save-every 1h", "use --save-every 50s"),
    ],
)
def test_the_warning_has_the_cost_of_a_lost_rank_and_the_fix(
    outcome: Outcome, own: str | None, cost: str, fix: str
) -> None:
    warning = loss_warning(outcome, "srun 22", own)
    assert warning.startswith(f"srun 22 {outcome.value}") and cost in warning and fix in warning


@pytest.mark.parametrize("outcome", [Outcome.LIVE, Outcome.FAILED])
def test_no_warning_where_no_step_is_lost_or_the_start_fails(outcome: Outcome) -> None:
    assert loss_warning(outcome, "mpirun", None) == ""
