"""Text generation by a language model, token by token."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from motley.errors import MotleyError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from motley.tasks.corpus import Codec


@dataclass(frozen=True)
class Sampling:
    """The way in which the next token is drawn.

    Attributes:
        temperature: divisor of the logits; 0: take the most probable token.
        top_k: only the ``top_k`` most probable tokens can be drawn; None: all tokens.
        top_p: only the smallest set of most probable tokens whose total probability is at least
            ``top_p`` can be drawn; 1: all tokens. Source: Holtzman et al., "The Curious Case of
            Neural Text Degeneration", 2020.
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float = 1.0

    def draw(self, logits: "Tensor", generator: "torch.Generator") -> int:
        """Draw the next token, and return its number.

        Args:
            logits: logits of all tokens, [vocabulary].
            generator: generator of random numbers, on the CPU.
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
    """A generator of text, with a trained language model.

    Attributes:
        net: the network, in evaluation mode.
        codec: encoder of text to the network's tokens.
        window: context length of the network in tokens.
        option: option that gives the prompt, for errors.
        chats: True if a prompt is a message of a user, and the text after it is the answer.
    """

    net: Any
    codec: "Codec"
    window: int
    option: str = "--prompt"
    chats: bool = False

    def encode(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt.

        Raises:
            MotleyError: the prompt is empty, or has characters that the model does not know.
        """
        unknown = sorted(set(prompt) - set(self.codec.alphabet or prompt))
        if unknown:
            raise MotleyError(
                f"{self.option} has characters that are not in the training text "
                f"({', '.join(unknown[:8])}); leave them out, or train on --tokens bytes"
            )
        text = self.codec.ask(prompt) if self.chats else prompt
        tokens: list[int] = self.codec.encode(text).tolist()
        if not tokens:
            raise MotleyError(
                f'{self.option} is empty; give it at least one character, as in {self.option} "\\n"'
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
