"""Which torch runs on every GPU of a lab."""

import pytest

from motley.errors import MotleyError
from motley.provision.install_cn import PYPI, HostGpu, choose_build

P4 = HostGpu("ecetesla0", "Tesla P4", (6, 1), "535.183.01")
GTX = HostGpu("ecetesla3", "NVIDIA GeForce GTX 1070", None, "470.256.02")
RTX = HostGpu("ecetesla1", "NVIDIA GeForce RTX 3070", (8, 6), "580.82.07")
BLACKWELL = HostGpu("new", "NVIDIA RTX PRO 6000", (12, 0), "580.82.07")


@pytest.mark.parametrize(
    ("gpus", "installed", "build"),
    [
        ([], "2.15.0", PYPI),
        ([], "2.9.1+cpu", "cpu"),
        ([RTX], "2.15.0", PYPI),
        ([RTX], "2.9.1+cu128", "cu128"),  # it works: not replaced
        ([RTX], "2.9.1+cpu", PYPI),
        ([RTX, P4], "2.15.0", "cu126"),
        ([HostGpu("b", "NVIDIA RTX 4090", (8, 9), "550.54.14")], "2.15.0", "cu126"),  # to 2.14
        ([RTX, GTX], "2.15.0", "cu118"),  # by its driver; its capability by its name
        ([HostGpu("b", "NVIDIA RTX 4090", (8, 9), "550.54.14"), BLACKWELL], "2.15.0", "cu128"),
    ],
)
def test_torch_is_chosen_by_the_oldest_gpu_and_the_lowest_driver(
    gpus: list[HostGpu], installed: str, build: str
) -> None:
    assert choose_build(gpus, installed)[0] == build


def test_gpus_that_no_torch_serves_are_named() -> None:
    with pytest.raises(MotleyError, match=r"ecetesla0: Tesla P4 \(6\.1\).*new: .*\(12\.0\)"):
        choose_build([P4, BLACKWELL], "2.15.0")


def test_the_end_of_a_build_is_said() -> None:
    _, why = choose_build([RTX, P4], "2.15.0")
    assert why == (
        "for ecetesla0: Tesla P4 (6.1), driver 535.183.01; torch 2.14 is its last version"
    )
