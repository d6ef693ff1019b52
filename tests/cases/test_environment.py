"""Environments of real labs: tools that hang, users without a name."""

import os
import pwd
import time
from pathlib import Path

import pytest

from motley.cluster import gpus, presence

CASES = Path(__file__).parent


def test_nvidia_smi_that_hangs_has_a_time_limit(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = CASES / "nvidia_smi" / "hang"
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(gpus, "NVIDIA_SMI_LIMIT_S", 0.5)
    monkeypatch.setattr(gpus.LimitedSmi, "has_timed_out", False)
    begun = time.monotonic()
    with gpus.GpuSampler(gputil_every_s=0) as sampler:
        sampler.sample()
        sampler.sample()
    assert time.monotonic() - begun < 5
    assert capfd.readouterr().err.count("nvidia-smi") == 1


def test_user_without_a_name_is_asked_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(uid: int) -> pwd.struct_passwd:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", fail)
    assert presence._on_gpu() == ""
