"""Search for a learning rate with Optuna; each trial trains on all machines.

python examples/optuna_search.py

Needs: pip install optuna. The study is a file, so the same command continues after an interruption.
Each trial has its own run folder in ``logs``, which ``motley diff`` and ``motley report`` can read.
"""

import os
import subprocess
from pathlib import Path

import optuna

from motley import records

TRIALS = int(os.environ.get("TRIALS", "8"))
LOGS, HOSTS = os.environ.get("MOTLEY_LOGS", "logs"), os.environ.get("HOSTFILE", "hosts.txt")


def objective(trial: optuna.Trial) -> float:
    rate = trial.suggest_float("lr", 1e-4, 1e-2, log=True)
    run = f"{trial.study.study_name}-{trial.number}"
    words = ["mpirun", "-np", "2", "--hostfile", HOSTS, "./entry_cn.sh",
             "torch_dist/train.py", "--epochs", "2", "--lr", str(rate),
             "--logs", LOGS, "--run", run]  # fmt: skip
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    return records.load(f"{LOGS}/{run}").epochs["top1"][-1]


storage = f"sqlite:///{LOGS}/study.db"
Path(LOGS).mkdir(exist_ok=True)
study = optuna.create_study(
    storage=storage, study_name="rate", direction="maximize", load_if_exists=True
)
study.optimize(objective, TRIALS - len(study.trials))
print(f"best: lr {study.best_params['lr']:.2g}, top1 {study.best_value:.3f}")
