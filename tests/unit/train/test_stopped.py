"""What somebody who stops a run is told of what is saved."""

from pathlib import Path

import torch

from motley.checkpoint.store import Checkpoints
from motley.train.start import how_to_continue


def test_whoever_stops_a_run_is_told_what_is_saved_of_it(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, 2)
    assert how_to_continue("mpirun x", checkpoints, None).startswith("nothing of it is saved yet; ")
    for step in (3, 12):
        checkpoints.save({"model.x": torch.ones(1)}, {"step": step})
    said = how_to_continue("mpirun x", checkpoints, None)
    assert said == "saved as of step 12: continue with: mpirun x"
    assert "keeps no checkpoints" in how_to_continue("mpirun x", checkpoints, 0)
