"""Which build of torch runs on every GPU of a lab.

All hosts need the same torch and NCCL, so the oldest GPU and the lowest driver decide.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from motley.errors import MotleyError

PYPI = "PyPI's"


@dataclass(frozen=True)
class Build:
    """One build of the torch wheels for Linux.

    Attributes:
        name: folder of https://download.pytorch.org/whl/; PYPI for the one on PyPI.
        oldest, newest: CUDA compute capabilities that it has kernels for.
        driver: lowest major version of the NVIDIA driver that it works with.
        last: release of torch that it ends with; empty: it goes on.
    """

    name: str
    oldest: tuple[int, int]
    newest: tuple[int, int]
    driver: int
    last: str = ""


# The first that fits is taken: the one with the newest torch. Sources, read on 2026-11-25:
# - capabilities: "PyTorch CUDA Support Matrix" in pytorch's RELEASE.md, releases 2.11 to 2.14
#   (pytorch#164471, #175253, #182849, #197555), and torch.cuda.get_arch_list(). Kernels of one
#   major version run on all later minor ones: sm_60's on 6.1, sm_86's on 8.9, sm_120's on 12.1.
# - ends: cu118 with 2.7 (pytorch#147383), cu128 with 2.11 (#178665), cu126 with 2.14 (#190385):
#   whoever has a Maxwell, Pascal or Volta somewhere holds all hosts at 2.14.
# - drivers: CUDA's minor version compatibility, 11.x: 450, 12.x: 525, 13.x: 580
#   (https://docs.nvidia.com/deploy/cuda-compatibility/).
BUILDS = (
    Build(PYPI, (7, 5), (12, 1), 580),
    Build("cu126", (5, 0), (9, 0), 525, last="2.14"),
    Build("cu128", (7, 5), (12, 1), 525, last="2.11"),
    Build("cu118", (5, 0), (9, 0), 450, last="2.7"),
)

# nvidia-smi of drivers before 510 does not know compute capabilities, but all names.
_FAMILIES = {
    "GTX 9": (5, 2), "GTX 10": (6, 1), "Tesla P4": (6, 1), "P100": (6, 0), "TITAN X": (6, 1),
    "V100": (7, 0), "TITAN V": (7, 0), "GTX 16": (7, 5), "RTX 20": (7, 5), "T4": (7, 5),
    "A100": (8, 0), "RTX 30": (8, 6), "RTX A": (8, 6), "RTX 40": (8, 9), "H100": (9, 0),
}  # fmt: skip


@dataclass(frozen=True)
class HostGpu:
    """A GPU as far as it matters here; ``driver`` is the whole version, "535.183.01"."""

    host: str
    name: str
    capability: tuple[int, int] | None
    driver: str


def fits(build: Build, gpu: HostGpu) -> bool:
    """Whether a build runs on a GPU; one of unknown capability is believed to be newer."""
    capability = gpu.capability or capability_of(gpu.name)
    known = capability is None or build.oldest <= capability <= build.newest
    return known and int(gpu.driver.partition(".")[0]) >= build.driver


def capability_of(name: str) -> tuple[int, int] | None:
    """Compute capability of a GPU by its name; None if it is not in the list."""
    found = [capability for part, capability in _FAMILIES.items() if part in name]
    return found[0] if found else None


def choose_build(gpus: Iterable[HostGpu], installed: str) -> tuple[str, str]:
    """The build for a lab, and why.

    Args:
        installed: torch's version here, such as "2.9.1+cu126"; its build stays if it fits.

    Raises:
        MotleyError: no build runs on all GPUs.
    """
    all_gpus = list(gpus)
    here = build_of(installed)
    if not all_gpus:
        return here, "no host has a GPU"
    fitting = [each for each in BUILDS if all(fits(each, gpu) for gpu in all_gpus)]
    if not fitting:
        raise MotleyError(
            f"no build of torch runs on all GPUs ({'; '.join(map(describe, all_gpus))}); leave the "
            "oldest or the newest host out of hosts.txt, or update the lowest driver"
        )
    best = next((each for each in fitting if each.name == here), fitting[0])
    limits = [gpu for gpu in all_gpus if not fits(BUILDS[0], gpu)] if best != BUILDS[0] else []
    why = f"for {describe(limits[0])}" if limits else "it runs on every GPU here"
    return best.name, why + (f"; torch {best.last} is the last that has it" if best.last else "")


def build_of(version: str) -> str:
    """The build that a version of torch is: "2.9.1+cu126" is cu126, "2.15.0" is PyPI's."""
    return version.partition("+")[2] or PYPI


def describe(gpu: HostGpu) -> str:
    """``ecetesla0: Tesla P4 (6.1), driver 535.183.01``"""
    capability = gpu.capability or capability_of(gpu.name)
    label = "unknown" if capability is None else f"{capability[0]}.{capability[1]}"
    return f"{gpu.host}: {gpu.name} ({label}), driver {gpu.driver}"
