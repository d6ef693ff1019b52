"""Write text with a trained language model, to the terminal.

    python torch_dist/generate.py logs/RUN --prompt "To be"
    python torch_dist/generate.py logs/RUN --prompt "To be" --length 500 --top-k 20
    python torch_dist/generate.py FOLDER --prompt "To be" --samples 3 --temperature 0.7

RUN is the folder of a run of --task text, or of one of its checkpoints. From a run, the command
loads the newest intact checkpoint. FOLDER has a model of the transformers library and its
tokenizer. The command prints each part of the text at once. Equal seeds give equal texts on one
device. The command uses a GPU if the host has one.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from motley.config.option import above_zero, positive
from motley.config.parser import OneVoice
from motley.errors import MotleyError
from motley.tasks.writer import Sampling, Writer
from motley.text import escape_unprintable


def open_writer(path: Path, averaged: bool = False, chats: bool | None = None) -> Writer:
    """Open the language model of a run, of a checkpoint, or of a folder of transformers.

    Args:
        path: the folder.
        averaged: True: use the moving average of the parameters.
        chats: True: prompts are messages of a user. None: as the model was trained.

    Raises:
        MotleyError: there is no checkpoint, or the model is not a language model.
    """
    import torch

    from motley.infer.predictor import open_trained
    from motley.tasks.builtin.text import TextTask

    if (path / "config.json").is_file() and not (path / "progress.json").is_file():
        if not [*path.glob("*.safetensors"), *path.glob("*.bin")]:  # pickles are refused below
            raise MotleyError(
                f"{path} has a config.json and no *.safetensors with weights; name the folder of a "
                "run or of a trained model"
            )
        task: Any = TextTask(pretrained=str(path))
        net = task.named.build(0.0)
        net.load_state_dict(task.named.weights(), strict=False)
    else:
        trained = open_trained(path, None, averaged=averaged)
        for problem in trained.problems:
            print(f"motley: not used: {problem}", file=sys.stderr)
        task = trained.task
        if not isinstance(task, TextTask):
            raise MotleyError(
                f"{path} is a run of another task ({task.title()}); name a run of --task text, or "
                "predict with infer_vit.py"
            )
        net = trained.build()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chats = task.chat if chats is None else chats
    return Writer(net.to(device).eval(), task.codec, task.window, chats=chats)


def main(words: Sequence[str] | None = None) -> int:
    """Write text for the options on the command line, and return the exit code."""
    escape_unprintable()
    parser = OneVoice(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run or of a model")
    parser.add_argument("--prompt", default="\n", metavar="TEXT", help="default: a new line")
    parser.add_argument("--chat", action=argparse.BooleanOptionalAction,
                        help="the prompt is a message of a user, and the text is the answer; "
                        "default: as the run was trained")  # fmt: skip
    parser.add_argument("--length", type=positive, default=200, metavar="N",
                        help="tokens to write, default 200")  # fmt: skip
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T",
                        help="divisor of the logits; 0: always take the most probable token"
                        )  # fmt: skip
    parser.add_argument("--top-k", type=positive, metavar="K",
                        help="draw among the K most probable tokens")  # fmt: skip
    parser.add_argument("--top-p", type=above_zero, default=1.0, metavar="P",
                        help=(
                            "draw among the most probable tokens that have this total "
                            "probability"
                        ))  # fmt: skip
    parser.add_argument("--samples", type=positive, default=1, metavar="N",
                        help="texts to write, default 1")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default 0")
    parser.add_argument(
        "--use-ema",
        action="store_true",
        help=("for a run with --model-ema: use the averaged parameters"),
    )
    options = parser.parse_args(words)
    if options.temperature < 0:
        parser.error(f"--temperature {options.temperature:g} is below 0; give 0 or more")
    if options.top_p > 1:
        parser.error(
            f"--top-p {options.top_p:g} is not a probability; give a number above 0 and up to 1"
        )
    sampling = Sampling(options.temperature, options.top_k, options.top_p)
    try:
        writer = open_writer(options.run, options.use_ema, options.chat)
        given = len(writer.encode(options.prompt))
        if given > writer.window:
            print(
                f"motley: the prompt has {given:,} tokens, and the model uses only the last "
                f"{writer.window:,}", file=sys.stderr)  # fmt: skip
        for number in range(options.samples):
            shown = options.prompt if options.prompt.strip() else ""
            print(shown, end="\n" if shown and writer.chats else "", flush=True)
            seed = options.seed + number
            for text in writer.write(options.prompt, options.length, sampling, seed):
                print(text, end="", flush=True)
            print("\n---" if number + 1 < options.samples else "", flush=True)
    except MotleyError as error:
        print(f"motley: {error}", file=sys.stderr)
        return 1
    return 0
