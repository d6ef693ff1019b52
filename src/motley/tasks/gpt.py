"""A GPT: transformer blocks with causal attention.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019. The
architecture and the initial weights follow this paper. The initial weights of projections into the
residual stream are scaled by the depth.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """The sizes of a GPT.

    Attributes:
        vocabulary: number of tokens in the vocabulary.
        length: length of the context, in tokens.
        depth: number of blocks.
        width: embedding width of a token.
        heads: number of attention heads.
        dropout: drop-out probability.
    """

    vocabulary: int
    length: int
    depth: int
    width: int
    heads: int
    dropout: float


def find_places(documents: Tensor) -> Tensor:
    """Return the position of each token in its document, counted from 0, [n, length].

    Args:
        documents: number of the document to which each token belongs, [n, length].
    """
    places = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return places - torch.where(begins, places, 0).cummax(dim=1).values


class Block(nn.Module):
    """A transformer block: causal attention, then two linear layers for each token."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, self._heads, self._dropout = shape.width, shape.heads, shape.dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(shape.dropout)
        self.fused_attn = True  # motley.tasks.net.set_attention may change it

    def forward(self, x: Tensor, sees: Tensor | None = None) -> Tensor:
        """Return the block's output, [n, length, width], of an input of the same shape.

        Args:
            x: the input.
            sees: attention mask, bool [n, 1, length, length]: True where the token of a row attends
                to the token of a column. None: each token attends to itself and all tokens before.
        """
        x = x + self.drop(self.proj(self._attend(self.norm1(x), sees)))
        hidden = functional.gelu(self.fc1(self.norm2(x)), approximate="tanh")
        out: Tensor = x + self.drop(self.fc2(hidden))
        return out

    def _attend(self, x: Tensor, sees: Tensor | None) -> Tensor:
        n, length, width = x.shape
        query, key, value = (
            self.qkv(x).view(n, length, 3, self._heads, width // self._heads).permute(2, 0, 3, 1, 4)
        )
        dropout = self._dropout if self.training else 0.0
        if self.fused_attn:
            seen = functional.scaled_dot_product_attention(
                query, key, value, attn_mask=sees, is_causal=sees is None, dropout_p=dropout
            )
        else:
            if sees is None:
                sees = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
            scores = query @ key.transpose(-2, -1) / math.sqrt(width // self._heads)
            weights = scores.masked_fill(~sees, -math.inf).softmax(dim=-1)
            seen = functional.dropout(weights, dropout) @ value
        merged: Tensor = seen.transpose(1, 2).reshape(n, length, width)
        return merged


class Gpt(nn.Module):
    """A language model that maps int64 tokens, [n, length], to logits of each next token.

    The logits have the shape [n, length, vocabulary].
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token = nn.Embedding(shape.vocabulary, shape.width)
        self.position = nn.Embedding(shape.length, shape.width)
        self.drop = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.depth))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.token.weight  # one matrix embeds tokens and predicts them
        for name, part in self.named_modules():
            if isinstance(part, nn.Linear | nn.Embedding):
                residual = name.endswith(("proj", "fc2"))
                std = 0.02 / math.sqrt(2 * shape.depth) if residual else 0.02
                nn.init.normal_(part.weight, std=std)
            if isinstance(part, nn.Linear) and part.bias is not None:
                nn.init.zeros_(part.bias)

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Return the logits of each next token, [n, length, vocabulary].

        Args:
            tokens: the tokens, [n, length].
            documents: number of the document to which each token belongs, [n, length]. Tokens
                attend to their own document alone. None: each row is one document.
        """
        places, sees = torch.arange(tokens.shape[1], device=tokens.device), None
        if documents is not None:
            sees = (documents[:, :, None] == documents[:, None, :]).tril()[:, None]
            places = find_places(documents)
        x = self.drop(self.token(tokens) + self.position(places))
        for block in self.blocks:
            x = block(x) if sees is None else block(x, sees)
        logits: Tensor = self.head(self.norm(x))
        return logits
