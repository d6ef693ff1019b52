"""The options of other tools, and their equivalents in Motley.

The tools are timm's ``train.py``, torchvision's references, Hugging Face's Trainer, Accelerate,
Lightning, nanoGPT, DeepSpeed, torchrun and Ultralytics.

The table SAME lists options with the same meaning in Motley. A command line may use their
spellings. The other tables are for error messages. NAMED gives the option of Motley that has the
same effect with another kind of value. ANSWERS gives a sentence for an option without equivalent.
VALUES gives a sentence for a value of an option.
"""

from collections.abc import Collection, Mapping, Sequence

# Each is replaced by these words. No entry stands for the run's folder, because
# setup/keep_training.sh and the line that continues a run look for --run, --logs and --resume.
SAME: Mapping[str, tuple[str, ...]] = {
    "-a": ("--model",),
    "--amp-dtype": ("--precision",),
    "--arch": ("--model",),
    "--auto-augment": ("--aa",),
    "--bf16": ("--precision", "bf16"),
    "--block-size": ("--length",),
    "--checkpoint-hist": ("--keep",),
    "--clip-grad-norm": ("--clip-grad",),
    "--cutmix-alpha": ("--cutmix",),
    "--data-path": ("--data-dir",),
    "--dataloader-num-workers": ("--workers",),
    "--dataset-text-field": ("--text-field",),
    "--dr": ("--decay-rate",),
    "--drop-connect": ("--drop-path",),
    "--dtype": ("--precision",),
    "--early-stopping-patience": ("--stop-after",),
    "--eval-interval": ("--eval-every",),
    "--eval-on-start": ("--eval-at-start",),
    "--eval-steps": ("--eval-every",),
    "--fp16": ("--precision", "fp16"),
    "--grad-clip": ("--clip-grad",),
    "--gradient-checkpointing": ("--grad-checkpointing",),
    "--gradient-clip-val": ("--clip-grad",),
    "--gradient-clipping": ("--clip-grad",),
    "--imgsz": ("--img-size",),
    "--jsd": ("--jsd-loss",),
    "--label-smoothing": ("--smoothing",),
    "--label-smoothing-factor": ("--smoothing",),
    "--learning-rate": ("--lr",),
    "--lora-r": ("--lora",),
    "--lora-rank": ("--lora",),
    "--lr-gamma": ("--decay-rate",),
    "--lr-min": ("--min-lr",),
    "--lr-scheduler": ("--sched",),
    "--lr-scheduler-type": ("--sched",),
    "--lr-step-size": ("--decay-epochs",),
    "--lr-warmup-epochs": ("--warmup-epochs",),
    "--max-epochs": ("--epochs",),
    "--max-grad-norm": ("--clip-grad",),
    "--max-iters": ("--max-steps",),
    "--max-length": ("--length",),
    "--max-seq-length": ("--length",),
    "--mixed-precision": ("--precision",),
    "--mixup-alpha": ("--mixup",),
    "--n-embd": ("--width",),
    "--n-head": ("--heads",),
    "--n-layer": ("--depth",),
    "--no-aug": ("--no-augment",),
    "--num-epochs": ("--epochs",),
    "--num-train-epochs": ("--epochs",),
    "--num-warmup-steps": ("--warmup-steps",),
    "--num-workers": ("--workers",),
    "--optim": ("--opt",),
    "--optimizer": ("--opt",),
    "--patience": ("--stop-after",),
    "--random-erase": ("--reprob",),
    "--save-total-limit": ("--keep",),
    "--scheduler": ("--sched",),
    "--tf32": ("--precision", "tf32"),
    "--torch-compile": ("--compile",),
    "--text-column-name": ("--text-field",),
    "--torchcompile": ("--compile",),
    "--train-batch-size": ("--batch-size",),
    "--train-crop-size": ("--img-size",),
    "--tokenizer-name": ("--tokenizer",),
    "--train-file": ("--text",),
    "--val-check-interval": ("--eval-every",),
    "--validation-file": ("--val-text",),
    "--warmup-iters": ("--warmup-steps",),
    "--wd": ("--weight-decay",),
}
# Options of Motley that may need another value.
NAMED: Mapping[str, str] = {
    "--ckpt-path": "--resume",
    "--default-root-dir": "--logs",
    "--eval-metric": "--keep-best",
    "--experiment": "--run",
    "--assistant-only-loss": "--chat",
    "--completion-only-loss": "--chat",
    "--config-name": "--hf-config",
    "--input-size": "--img-size",
    "--metric-for-best-model": "--keep-best",
    "--model-name-or-path": "--pretrained",
    "--num-steps": "--max-steps",
    "--out-dir": "--logs",
    "--packing": "--pack",
    "--output": "--logs",
    "--pretrained-path": "--initial-checkpoint",
    "--recovery-interval": "--save-every",
    "--resume-from": "--resume",
    "--resume-from-checkpoint": "--resume",
    "--use-peft": "--lora",
    "--run-name": "--run",
    "--save-steps": "--save-every",
    "--train-interpolation": "--interpolation",
    "--tta": "--test-crops",
    "--weights": "--initial-checkpoint",
}

_LAUNCH = (
    "the launcher decides this: mpirun -np N --hostfile hosts.txt ./entry_cn.sh starts N ranks "
    "on the hosts of hosts.txt; leave the option out"
)
_TRACKER = (
    "a run is published during training, or later, with: python plots/publish.py logs/RUN --to "
    "{} --follow"
)
_ONE_BATCH = (
    "--batch-size is the global batch, which Motley splits by the speeds of the ranks; give the "
    "batch of one device times the number of devices"
)
_ACCUMULATION = (
    "Motley accumulates gradients by itself: each rank computes its share of the global "
    "--batch-size in pieces that fit its memory; leave this option out"
)
_WARMUP = "the warm-up is counted in steps or epochs: --warmup-steps K, or --warmup-epochs 0.5"
_ARGUMENTS = "write it after --opt-kwargs, as in betas=0.9,0.95 eps=1e-8"
_EVALUATION = (
    "each epoch ends with an evaluation of all held-out samples, and --eval-every K evaluates "
    "every K steps; leave this option out"
)
_PRECISION = (
    "--precision auto, the default, computes in 16 bits where that is faster; leave this option out"
)
_CLASSES = "the data set determines the number of classes; leave this option out"
_DEEPSPEED = (
    "DeepSpeed trains with a script of its own: mpirun -np 2 ./entry_cn.sh "
    "deepspeed/train_vit.py --stage 3"
)
_DEVICE = "each rank takes one GPU, or the CPU if there is none; CUDA_VISIBLE_DEVICES hides GPUs"
_STRATEGY = "it is --strategy fsdp"
_FOLDER = "the folder of a run is LOGS/NAME: give --logs LOGS --run NAME"
_PROGRESS = "the option is --log-interval, in seconds"

_SPELLINGS: Mapping[str, tuple[str, ...]] = {
    _LAUNCH: (
        "--gpu-ids", "--gpus", "--include", "--machine-rank", "--main-process-ip",
        "--main-process-port", "--master-addr", "--master-port", "--multi-gpu", "--nnodes",
        "--node-rank", "--nproc-per-node", "--num-gpus", "--num-machines", "--num-nodes",
        "--num-processes", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--world-size",
        "--dist-url", "--devices", "--hostfile", "--exclude", "--max-restarts", "--standalone",
    ),
    _ONE_BATCH: (
        "--per-device-batch-size", "--per-device-train-batch-size", "--per-gpu-train-batch-size",
        "--train-micro-batch-size-per-gpu",
    ),
    "an evaluation computes its samples in pieces that fit in memory; leave this option out": (
        "--eval-batch-size", "--per-device-eval-batch-size", "--validation-batch-size",
    ),
    "Motley pins memory and prefetches automatically; leave this option out": (
        "--dataloader-pin-memory", "--no-prefetcher", "--pin-mem", "--pin-memory",
    ),
    "Motley does this automatically; leave this option out": (
        "--ddp-find-unused-parameters", "--overwrite-output-dir",
    ),
    "the model's configuration decides how pixels are scaled; leave this option out": (
        "--mean", "--std",
    ),
    "a data set names its splits (train, and validation, val or test); leave this option out": (
        "--train-split",
    ),
    "--data-fraction F trains on a fraction of the training data, and --eval-samples N evaluates "
    "on N held-out samples": (
        "--train-num-samples", "--val-num-samples",
    ),
    "CIFAR is downloaded where it is missing; leave this option out": ("--dataset-download",),
    "classes are sorted by name, and --classes selects some of them; leave this option out": (
        "--class-map",
    ),
    "images are read with as many channels as the data set has; leave this option out": (
        "--in-chans", "--input-img-mode",
    ),
    "the data set decides which columns hold the image and the label; for a CSV file, use "
    "--label-columns": (
        "--input-key", "--target-key",
    ),
    "Motley runs no code of a data set; leave this option out": ("--dataset-trust-remote-code",),
    "--initial-checkpoint loads only weights, not the optimizer's state": (
        "--no-resume-opt",
    ),
    "Motley builds a model as timm registers it; for other arguments, write a task of your own": (
        "--bn-eps", "--bn-momentum", "--drop-block", "--fast-norm", "--gp", "--head-init-bias",
        "--head-init-scale", "--model-kwargs",
    ),
    "GPUs that compute in 16 bits always use channels last; leave this option out": (
        "--channels-last",
    ),
    "--compile compiles with torch's usual mode; leave this option out": (
        "--fuser", "--torchcompile-mode", "--torchscript",
    ),
    "Motley's own code adds up gradients and waits for devices; leave this option out": (
        "--device-modules", "--no-ddp-bb", "--synchronize-step",
    ),
    "only --layer-decay sets the rates of layers; leave this option out": (
        "--layer-decay-min-scale", "--layer-decay-no-opt-scale",
    ),
    "Motley takes the fastest implementation that a device has; leave this option out": (
        "--opt-foreach",
    ),
    "the learning rate changes in each step anyway; leave this option out": ("--sched-on-updates",),
    "--lr is the rate for the global batch: give --lr-base times the batch size, divided by "
    "--lr-base-size": (
        "--lr-base", "--lr-base-scale", "--lr-base-size",
    ),
    "for such a rate, define schedule(step, total) in a task of your own": (
        "--cooldown-epochs", "--lr-k-decay", "--patience-epochs",
    ),
    "the noise of --lr-noise has a standard deviation of 1; leave this option out": (
        "--lr-noise-std",
    ),
    "the schedule always begins after the warm-up; leave this option out": ("--warmup-prefix",),
    "an epoch uses each sample once: give more --epochs, or --balanced-sampling": (
        "--aug-repeats", "--epoch-repeats",
    ),
    "crops are random and resized, within --scale and --ratio; leave this option out": (
        "--train-crop-mode",
    ),
    "change colours by --color-jitter, or by a policy such as --aa rand-m9": (
        "--color-jitter-prob", "--gaussian-blur-prob", "--grayscale-prob",
    ),
    "--bce-loss takes the mean over the classes, and --class-weights weights them": (
        "--bce-pos-weight", "--bce-sum",
    ),
    "--mixup and --cutmix mix each pair of neighbours with a ratio of its own": (
        "--cutmix-minmax", "--mixup-mode",
    ),
    "to end mixing at step K, stop with --max-steps K, and continue with --resume auto --mixup 0 "
    "--cutmix 0": (
        "--mixup-off-epoch",
    ),
    "the average is on each rank's device, and is the same on all ranks; leave this option out": (
        "--model-ema-force-cpu",
    ),
    "each sample has its own seed, from --seed, epoch and index; leave this option out": (
        "--worker-seeding",
    ),
    "the report shows the held-out images with the largest loss: --worst N": ("--save-images",),
    "loader processes serve the whole run; leave this option out": ("--use-multi-epochs-loader",),
    "the schedule ends with the run, at --max-steps or --epochs; leave this option out": (
        "--lr-decay-iters", "--lr-decay-steps",
    ),
    "--resume auto continues after the last saved step": ("--start-epoch",),
    "--resume auto continues a run; --pretrained or --initial-checkpoint FILE starts one with "
    "weights": ("--init-from",),
    "the option is --paragraphs of --task text": ("--group-by-length",),
    _ACCUMULATION: (
        "--accum-iter", "--accumulate-grad-batches", "--grad-accum-steps",
        "--gradient-accumulation-steps",
    ),
    _WARMUP: ("--warmup", "--warmup-ratio"),
    _ARGUMENTS: (
        "--adam-beta1", "--adam-beta2", "--adam-epsilon", "--beta1", "--beta2", "--opt-betas",
        "--opt-eps", "--optim-args",
    ),
    _EVALUATION: (
        "--check-val-every-n-epoch", "--do-eval", "--do-train", "--eval-iters", "--eval-strategy",
        "--evaluation-strategy", "--val-interval",
    ),
    "--keep-best METRIC keeps the best checkpoint, as checkpoints/best in the run's folder": (
        "--greater-is-better", "--load-best-model-at-end", "--save-best",
    ),
    _PRECISION: (
        "--amp", "--amp-impl", "--apex-amp", "--autocast", "--model-dtype", "--native-amp",
        "--use-amp",
    ),
    _CLASSES: ("--num-classes", "--num-labels", "--vocab-size"),
    _DEEPSPEED: ("--deepspeed", "--deepspeed-config", "--stage", "--zero-stage"),
    _DEVICE: ("--accelerator", "--backend", "--ddp-backend", "--device", "--no-cuda",
              "--use-cpu"),
    _STRATEGY: ("--fsdp", "--fsdp-config"),
    _FOLDER: ("--name", "--output-dir", "--project", "--save-dir"),
    _PROGRESS: ("--log-every-n-steps", "--log-freq", "--logging-steps", "--print-freq"),
    "batch norm takes its statistics over groups of --bn-group samples, on any number of ranks": (
        "--dist-bn", "--split-bn", "--sync-batchnorm", "--sync-bn",
    ),
    "a text is held out with --val-fraction F or --val-text FILE; other data has its own "
    "held-out folder": ("--val-split", "--validation-split-percentage"),
    _TRACKER.format("wandb"): (
        "--log-wandb", "--use-wandb", "--wandb", "--wandb-log", "--wandb-project",
        "--wandb-resume-id", "--wandb-run-name", "--wandb-tags",
    ),
    _TRACKER.format("tensorboard"): (
        "--log-tensorboard", "--report-to", "--tensorboard", "--use-tensorboard",
    ),
    _TRACKER.format("mlflow"): ("--mlflow",),
}  # fmt: skip
ANSWERS: Mapping[str, str] = {
    word: answer for answer, words in _SPELLINGS.items() for word in words
}
# Where data are, for a task of texts: other tasks have these options.
OF_TEXT = dict.fromkeys(
    ("--data-dir", "--data-path", "--dataset"),
    "give a text with --text FILE or DIR, as in --text shakespeare --tokens characters",
)
_CONSTANT = "for a constant rate, give --warmup-epochs 0, and --min-lr the value of --lr"
_RISES = (
    "for a rate that rises and then stays, give --warmup-epochs E, and --min-lr the value of --lr"
)
# By Motley's option, values of other tools in small letters and with dashes.
VALUES: Mapping[str, Mapping[str, str]] = {
    "--sched": {
        "constant": _CONSTANT, "none": _CONSTANT, "constant-with-warmup": _RISES,
        "cosineannealinglr": "it is cosine", "linear": "it is poly", "polynomial": "it is poly",
        "steplr": "it is step", "multisteplr": "it is multistep",
    },
}  # fmt: skip
_TRAINER = "--trainer."  # Lightning's command line
# Switches that the Trainer's users give a value.
_SWITCHES = frozenset((
    "--bf16", "--eval-on-start", "--fp16", "--gradient-checkpointing", "--tf32", "--torch-compile",
))  # fmt: skip
_ON_OFF = {"true": "on", "false": "off"}
_TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def with_dashes(word: str, known: Collection[str]) -> str:
    """Replace underscores in an option by dashes, if this gives a known option.

    Args:
        word: option as typed, which may include ``=VALUE``.
        known: all options of the command.
    """
    name, joined, value = word.partition("=")
    dashed = name.replace("_", "-")
    return dashed + joined + value if name not in known and dashed in known else word


def own_words(words: Sequence[str], known: Collection[str]) -> list[str]:
    """Return a command line in which other tools' options are replaced by Motley's.

    Args:
        words: words as typed.
        known: all options of the command. Options without an equivalent stay as they are.
    """
    result, remaining = list[str](), list(words)
    while remaining:
        name, joined, value = with_dashes(remaining.pop(0), known).partition("=")
        other = plain_name(name)
        own = SAME.get(other, ())
        if name == "--compile":
            value = _ON_OFF.get(value.lower(), value)
        if name not in known and other in known:  # written with Lightning's prefix --trainer.
            name = other
        if name in known or not own or own[0] not in known:
            result.append(name + joined + value)
            continue
        if other in _SWITCHES and (joined or remaining[:1]):
            is_on = _TRUTH.get((value if joined else remaining[0]).lower())
            if is_on is not None and not joined:
                remaining.pop(0)
            if is_on is not None:
                result += own if is_on else ()
                continue
        result += [*own[:-1], own[-1] + joined + value]
    return result


def plain_name(word: str) -> str:
    """Return an option's name with dashes, and without Lightning's ``--trainer.``."""
    dashed = word.replace("_", "-")
    return f"--{dashed.removeprefix(_TRAINER)}" if dashed.startswith(_TRAINER) else dashed


def answer_value(name: str, value: object) -> str:
    """Return a sentence for an option's value from another tool; empty if there is none."""
    return VALUES.get(name, {}).get(str(value).lower().replace("_", "-"), "")


def own_name(word: str) -> str | None:
    """Return Motley's equivalent of an option of another tool; None if there is none."""
    name = plain_name(word)
    return " ".join(SAME[name]) if name in SAME else NAMED.get(name)
