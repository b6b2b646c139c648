"""Text that every Python carries, as bytes, and the batches drawn from it."""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from torch import Tensor

VOCABULARY = 256


def corpus() -> Tensor:
    """Topics of Python's own help, joined in the order of their names, one byte an element.

    Shapes: (num_bytes,), int64, about 500,000 to 800,000 by the Python version.
    """
    text = "\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(torch.int64)


def batch_starts(num_bytes: int, *, steps: int, batch: int, sequence: int, seed: int) -> Tensor:
    """Start of every sequence of every step; equal on all ranks, for they share the seed.

    Shapes: (steps, batch), each in 0..num_bytes - sequence - 1, so that a next byte always exists.

    >>> batch_starts(100, steps=2, batch=3, sequence=7, seed=0).shape
    torch.Size([2, 3])
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(num_bytes - sequence, (steps, batch), generator=generator)


def read_batch(text: Tensor, starts: Tensor, positions: slice) -> tuple[Tensor, Tensor]:
    """Bytes at `positions` of each sequence, and the byte that follows each of them.

    Shapes: both (batch, positions.stop - positions.start).

    >>> tokens, following = read_batch(torch.arange(9), torch.tensor([0, 4]), slice(1, 3))
    >>> tokens.tolist(), following.tolist()
    ([[1, 2], [5, 6]], [[2, 3], [6, 7]])
    """
    index = starts[:, None] + torch.arange(positions.start, positions.stop)
    return text[index], text[index + 1]


class Batches:
    """Batches of an experiment, equal on every rank."""

    def __init__(self, steps: int, batch: int, sequence: int, seed: int) -> None:
        self._text = corpus()
        self._everything = slice(0, sequence)
        self._starts = batch_starts(len(self._text), steps=steps, batch=batch, sequence=sequence, seed=seed)

    def read(self, step: int, positions: slice | None = None) -> tuple[Tensor, Tensor]:
        """Tokens of a step and the bytes that follow them, at some positions of each sequence or at all."""
        return read_batch(self._text, self._starts[step], self._everything if positions is None else positions)
