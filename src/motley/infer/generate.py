"""Write text with a trained language model, to the terminal.

    python torch_dist/generate.py logs/RUN --prompt "To be"
    python torch_dist/generate.py logs/RUN --prompt "To be" --length 500 --top-k 20
    python torch_dist/generate.py FOLDER --prompt "To be" --samples 3 --temperature 0.7

RUN is a run of --task text, whose newest intact checkpoint is used, or a checkpoint. FOLDER has a
model of the transformers library and its tokenizer. The text appears while it is made. Equal
seeds give equal texts on one device. A GPU is used if there is one.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from motley.config.option import above_zero, positive
from motley.config.parser import OneVoice
from motley.errors import MotleyError
from motley.text import escape_unprintable

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from motley.tasks.builtin.text import TextTask
    from motley.tasks.corpus import Codec

_WINDOW = 1024  # tokens that a model of transformers sees, if its config.json names no limit


@dataclass(frozen=True)
class Sampling:
    """The way in which the next token is drawn.

    Attributes:
        temperature: divisor of the logits; 0: the most probable token.
        top_k: number of the most probable tokens that can be drawn; None: all.
        top_p: smallest total probability of the most probable tokens that can be drawn, from 0 to
            1; 1: all. Source: Holtzman et al., "The Curious Case of Neural Text Degeneration",
            2020.
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float = 1.0

    def draw(self, logits: "Tensor", generator: "torch.Generator") -> int:
        """Return a token.

        Args:
            logits: logits of all tokens, [vocabulary].
            generator: random numbers, on the CPU.
        """
        import torch

        if self.temperature == 0:
            return int(logits.argmax())
        logits = logits.double().cpu() / self.temperature
        if self.top_k is not None and self.top_k < len(logits):
            least = logits.topk(self.top_k).values[-1]
            logits = logits.masked_fill(logits < least, -torch.inf)
        ordered, places = logits.softmax(0).sort(descending=True)
        before = ordered.cumsum(0) - ordered
        ordered[before >= self.top_p] = 0.0  # the first one always stays
        return int(places[torch.multinomial(ordered, 1, generator=generator)])


@dataclass(frozen=True)
class Writer:
    """A trained language model.

    Attributes:
        net: the network, in evaluation mode.
        codec: its tokens.
        window: number of tokens that it sees.
    """

    net: Any
    codec: "Codec"
    window: int

    def encode(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt.

        Raises:
            MotleyError: the prompt is empty, or has characters that the model does not know.
        """
        unknown = sorted(set(prompt) - set(self.codec.alphabet or prompt))
        if unknown:
            raise MotleyError(
                f"--prompt has characters that the training text lacks ({', '.join(unknown[:8])}): "
                "leave them out, or train on --tokens bytes"
            )
        tokens: list[int] = self.codec.encode(prompt).tolist()
        if not tokens:
            raise MotleyError(
                '--prompt is empty: give it a character at least, as in --prompt "\\n"'
            )
        return tokens

    def write(self, prompt: str, length: int, sampling: Sampling, seed: int) -> Iterator[str]:
        """Yield the text after a prompt, in parts, up to the end of a document.

        Args:
            prompt: the prompt.
            length: largest number of tokens to write.
            sampling: the way in which tokens are drawn.
            seed: seed of the random numbers.
        """
        import torch

        from motley.tasks.hf_model import get_logits

        generator = torch.Generator().manual_seed(seed)
        tokens = self.encode(prompt)
        start, shown = len(tokens), 0
        device = next(self.net.parameters()).device
        for left in range(length - 1, -1, -1):
            seen = torch.tensor([tokens[-self.window :]], device=device)
            with torch.inference_mode():
                logits = get_logits(self.net(seen))[0, -1, : self.codec.size]
            tokens.append(sampling.draw(logits, generator))
            if tokens[-1] == self.codec.end:
                return
            text = self.codec.decode(tokens[start:])
            # The bytes of a character may be several tokens.
            if left and text.endswith("\N{REPLACEMENT CHARACTER}"):
                continue
            yield text[shown:]
            shown = len(text)


def open_writer(path: Path, averaged: bool = False) -> Writer:
    """Return the language model of a run, of a checkpoint, or of transformers' folder.

    Args:
        path: the folder.
        averaged: True: use the average of the parameters.

    Raises:
        MotleyError: there is no checkpoint, or it is no language model's.
    """
    import torch

    from motley.infer.predictor import open_trained
    from motley.tasks.builtin.text import TextTask

    if (path / "config.json").is_file() and not (path / "progress.json").is_file():
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
                f"{path} is a run of another task ({task.title()}): name a run of --task text, or "
                "predict with infer_vit.py"
            )
        net = trained.build()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Writer(net.to(device).eval(), task.codec, _find_window(task))


def _find_window(task: "TextTask") -> int:
    if task.named is None:
        return task.length
    return task.named.longest or _WINDOW


def main(words: Sequence[str] | None = None) -> int:
    """Write text as the command line says, and return the exit code."""
    escape_unprintable()
    parser = OneVoice(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run or of a model")
    parser.add_argument("--prompt", default="\n", metavar="TEXT", help="default: a new line")
    parser.add_argument("--length", type=positive, default=200, metavar="N",
                        help="tokens to write, default 200")  # fmt: skip
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T",
                        help="divides the logits; 0: always the most probable")  # fmt: skip
    parser.add_argument("--top-k", type=positive, metavar="K",
                        help="draw among the K most probable tokens")  # fmt: skip
    parser.add_argument("--top-p", type=above_zero, default=1.0, metavar="P",
                        help="draw among the most probable tokens of this total")  # fmt: skip
    parser.add_argument("--samples", type=positive, default=1, metavar="N",
                        help="texts to write, default 1")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default 0")
    parser.add_argument(
        "--use-ema", action="store_true", help="of a run with --model-ema: what it has averaged"
    )
    options = parser.parse_args(words)
    if options.temperature < 0:
        parser.error(f"--temperature {options.temperature:g} is below 0; give 0 or more")
    if options.top_p > 1:
        parser.error(f"--top-p {options.top_p:g} is no probability; give a number up to 1")
    sampling = Sampling(options.temperature, options.top_k, options.top_p)
    try:
        writer = open_writer(options.run, options.use_ema)
        given = len(writer.encode(options.prompt))
        if given > writer.window:
            print(f"motley: the prompt has {given:,} tokens, and the model sees the last "
                  f"{writer.window:,}", file=sys.stderr)  # fmt: skip
        for number in range(options.samples):
            print(options.prompt if options.prompt.strip() else "", end="", flush=True)
            seed = options.seed + number
            for text in writer.write(options.prompt, options.length, sampling, seed):
                print(text, end="", flush=True)
            print("\n---" if number + 1 < options.samples else "", flush=True)
    except MotleyError as error:
        print(f"motley: {error}", file=sys.stderr)
        return 1
    return 0
