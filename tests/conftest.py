"""What the tests share: jobs, and what a lab installs."""

import gc
import os
import shutil
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from jobs import Jobs
from lab_wheels import make_python_archive, make_wheels
from lanes import Lanes, machine, place_of, take_place, times_again
from warm.ranks import WarmRanks
from warm.script import MODULES

pytest_plugins = ["turns"]

# Torch, not imported yet, then computes in one thread here. Two that share processors with other
# tests wait for each other by spinning: 5 s for what one does in 0.7 s.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes says what else this machine does meanwhile.
settings.register_profile("beside", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("beside")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Lanes:
    """Which worker runs what."""
    config.option.loadscopereorder = False
    return Lanes(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest comes first; and what starts ranks may be run again."""
    items.sort(key=place_of)
    for item in items:
        if again := times_again(item):
            item.add_marker(pytest.mark.flaky(reruns=again))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported stays: to look at each of its million objects takes half a second, while
    it is made and whenever Python looks for what is garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What failed and then passed is told as what failed is: the next fault shows itself so."""
    if reports := terminalreporter.getreports("rerun"):
        terminalreporter.section("failed, and passed when run again")
        for report in reports:
            terminalreporter.write_sep("_", report.nodeid)
            terminalreporter.line(report.longreprtext)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """With its fixtures."""
    with machine(item):
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before its fixtures."""
    take_place(item)


@pytest.fixture(scope="session")
def ranks() -> Iterator[WarmRanks]:
    """Ranks that begin at once."""
    with WarmRanks(MODULES) as started:
        yield started


@pytest.fixture
def jobs(tmp_path: Path, ranks: WarmRanks) -> Iterator[Jobs]:
    """Jobs with their logs in this test's own folder."""
    started = Jobs(tmp_path, ranks)
    yield started
    started.end()


@pytest.fixture(scope="module")
def module_jobs(tmp_path_factory: pytest.TempPathFactory, ranks: WarmRanks) -> Iterator[Jobs]:
    """Jobs whose runs a whole module looks at."""
    started = Jobs(tmp_path_factory.mktemp("jobs"), ranks)
    yield started
    started.end()


@pytest.fixture(scope="session")
def python_archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A standalone Python, packed."""
    return make_python_archive(tmp_path_factory.mktemp("python") / "python.tar.gz")


@pytest.fixture(scope="session")
def parts(tmp_path_factory: pytest.TempPathFactory, python_archive: Path) -> Path:
    """A folder with wheels, their requirements.lock, and python.tar.gz."""
    folder = tmp_path_factory.mktemp("parts")
    make_wheels(folder)
    shutil.copy(python_archive, folder)
    return folder
