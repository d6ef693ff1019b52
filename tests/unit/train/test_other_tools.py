"""Options as users of other tools type them: each works, or gets the right answer in one line."""

import pytest

from motley.config import other_tools
from motley.engines.strategies import TORCH, known_strategies
from motley.provision.launch_line import LaunchLine
from motley.train.command_line import _without_place, read_config, training_parser

WORK = {
    "--batch_size 64": {"batch_size": 64},
    "--weight_decay=0.1": {"weight_decay": 0.1},
    "--no_augment": {"augment": False},
    "--resume": {"resume": "auto"},
    "--resume --lr 1e-3": {"resume": "auto", "lr": 1e-3},
    "--checkpoint-hist 3": {"keep": 3},  # timm
    "--amp-dtype bfloat16": {"precision": "bf16"},
    "--torchcompile": {"compile": "on"},
    "-a resnet50": {"model": "resnet50"},  # torchvision
    "--lr-step-size 30 --lr-gamma 0.1": {"decay_epochs": 30.0, "decay_rate": 0.1},
    "--label-smoothing 0.2 --random-erase 0.1": {"smoothing": 0.2, "reprob": 0.1},
    "--auto-augment rand-m9": {"aa": "rand-m9"},
    "--data-path there": {"data_dir": "there"},
    "--learning_rate 3e-4": {"lr": 3e-4},  # Hugging Face's Trainer
    "--num_train_epochs 3": {"epochs": 3},
    "--max_grad_norm 1": {"clip_grad": 1.0},
    "--lr_scheduler_type cosine": {"sched": "cosine"},
    "--save_total_limit 5": {"keep": 5},
    "--optim adamw --dataloader_num_workers 2": {"opt": "adamw", "workers": 2},
    "--fp16": {"precision": "fp16"},
    "--bf16 True --seed 1": {"precision": "bf16", "seed": 1},
    "--bf16=False --gradient_checkpointing False --seed 1": {"seed": 1},
    "--gradient_checkpointing True": {"grad_checkpointing": "blocks"},
    "--torch_compile=True": {"compile": "on"},
    "--mixed_precision no": {"precision": "fp32"},  # Accelerate
    "--max_epochs 3 --gradient_clip_val 0.5": {"epochs": 3, "clip_grad": 0.5},  # Lightning
    "--trainer.max_epochs 3 --precision bf16-mixed": {"epochs": 3, "precision": "bf16"},
    "--precision 16,32-true": {"precision": "fp16,fp32"},
    "--task text --block_size=64 --n_layer 6": {"length": 64, "depth": 6},  # nanoGPT
    "--task text --n_head 6 --n_embd 384": {"heads": 6, "width": 384},
    "--max_iters=10 --grad_clip=1.0 --dtype=float16 --warmup_iters=5": {
        "max_steps": 10, "clip_grad": 1.0, "precision": "fp16", "warmup_steps": 5,
    },
    "--task text --lora_r 8 --max_seq_length 64": {"lora": 8, "length": 64},
    "--compile=False --trainer.max_steps 9": {"compile": "off", "max_steps": 9},
    "--num_train_epochs 3.0 --gradient_clipping 1": {"epochs": 3, "clip_grad": 1.0},
    "--imgsz 64 --patience 3": {"img_size": 64, "stop_after": 3},  # Ultralytics
    "--eval_steps 50 --eval_on_start True": {"eval_every": 50, "eval_at_start": True},
}  # fmt: skip
ANSWERED = {
    "--block_size 64": "it is --length, of --task text",
    "--log-wandb": "--to wandb --follow",
    "--wandb_project x": "--to wandb --follow",
    "--report_to all": "--to tensorboard --follow",
    "--tensorboard": "python plots/publish.py logs/RUN --to tensorboard --follow",
    "--experiment try": "it is --run here",
    "--output out": "it is --logs here",
    "--output_dir out": "give --logs LOGS --run NAME",
    "--input-size 3 224 224": "it is --img-size here",
    "--gradient-accumulation-steps 4": "accumulates gradients by itself",
    "--accumulate_grad_batches=4": "accumulates gradients by itself",
    "--per_device_train_batch_size 8": "--batch-size is the global batch",
    "--per-device-eval-batch-size 8": "pieces that fit in memory; leave this option out",
    "--deepspeed ds.json": "deepspeed/train_vit.py --stage 3",
    "--stage 3": "deepspeed/train_vit.py --stage 3",
    "--num_nodes 2": "the launcher decides this: mpirun -np N",
    "--devices 4": "the launcher decides this",
    "--gpus 4": "the launcher decides this",
    "--nproc_per_node 2": "the launcher decides this",
    "--trainer.devices 2": "the launcher decides this",
    "--local_rank 0": "another launcher",
    "--device cuda": "each rank takes one GPU",
    "--amp": "--precision auto, the default",
    "--warmup_ratio 0.1": "--warmup-steps K, or --warmup-epochs 0.5",
    "--beta2 0.95": "--opt-kwargs, as in betas=0.9,0.95",
    "--eval_strategy steps": "each epoch ends with an evaluation",
    "--load_best_model_at_end": "--keep-best METRIC keeps the best checkpoint",
    "--metric_for_best_model loss": "it is --keep-best here",
    "--lr_decay_iters 9": "the schedule ends with the run",
    "--standalone": "the launcher decides this",
    "--num-classes 10": "the data set determines",
    "--sync-bn": "--bn-group",
    "--fsdp full_shard": "--strategy fsdp",
    "--save_steps 100": "it is --save-every here",
    "--resume_from_checkpoint x": "it is --resume here",
    "--model_name_or_path gpt2": "it is --pretrained here",
    "--logging_steps 10": "--log-interval, in seconds",
    "--mean 0.5": "the model's configuration",
    "--sched constant": "give --warmup-epochs 0, and --min-lr the value of --lr",
    "--lr_scheduler_type none": "give --warmup-epochs 0, and --min-lr the value of --lr",
    "--lr_scheduler_type=constant_with_warmup": "--warmup-epochs E, and --min-lr the value of --lr",
    "--lr-scheduler-type linear": "linear: it is poly",
    "--bf16=maybe": "--precision bf16=maybe is unknown (nearest: bf16)",
    "/": "a folder of images is --dataset folder --data-dir /",
    "imagenet": "unexpected word imagenet: each value follows its option",
    "--epoch 3": "(nearest: --epochs)",
    "--batch 16": "(nearest: --batch-size)",
    "--wieght-decay 3": "(nearest: --weight-decay)",
}
# No option does the same, so none is named.
UNKNOWN = ("--lora_dropout", "--nodes", "--push_to_hub")


def read(words: str) -> dict[str, object]:
    config = read_config(training_parser("test", known_strategies(TORCH)), words.split())
    values = {name: declared.to_text(value) for name, declared, value in config.options()}
    return {name: values[name] for name in config.typed_names if name != "task"}


@pytest.mark.parametrize("words", WORK)
def test_a_spelling_of_the_same_option_works(words: str) -> None:
    assert read(words) == WORK[words]


@pytest.mark.parametrize("words", ANSWERED)
def test_another_tools_option_has_the_right_answer(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        read(words)
    said = capsys.readouterr().err
    assert stop.value.code == 2 and ANSWERED[words] in said and said.count("\n") == 1, said
    assert "nearest" not in said or "nearest" in ANSWERED[words]


@pytest.mark.parametrize("word", UNKNOWN)
def test_no_option_is_named_where_none_is_near(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        read(f"{word} 1")
    assert f"unknown option {word}; see " in capsys.readouterr().err


def test_every_name_that_is_given_is_an_option_here() -> None:
    tasks = [training_parser("test") for _ in range(2)]
    for parser, task in zip(tasks, ("image", "text"), strict=True):
        read_config(parser, ["--task", task])
    known = {name for parser in tasks for name in parser._option_string_actions}
    named = {own[0] for own in other_tools.SAME.values()} | {*other_tools.NAMED.values()}
    assert named <= known
    assert not known & {*other_tools.SAME, *other_tools.NAMED, *other_tools.ANSWERS}


def test_other_readers_of_the_line_know_these_spellings() -> None:
    line = LaunchLine.parse(
        [
            "mpirun",
            "-H",
            "a,b",
            "./entry_cn.sh",
            "train.py",
            "--resume",
            "--save_every",
            "9",
            "--shares=5,4",
        ]
    )
    assert line.save_every == "9" and line.saving_every("50s") == line
    assert line.resumed(False) == line
    assert line.resumed(True).words[4:7] == ("train.py", "--resume", "auto")
    assert line.resumed(True).words[-1] == "--shares=5,4"
    assert [*_without_place(["--resume", "--lr", "3", "--run", "a"])] == ["--lr", "3"]
