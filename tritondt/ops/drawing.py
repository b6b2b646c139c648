"""Random operators taken apart into those that fill a tensor, which give one device's numbers whatever the layout."""

from typing import Any

import torch


def choices(
    weights: torch.Tensor, count: int, replacement: bool = False, *, generator: torch.Generator | None = None
) -> torch.Tensor:
    """`count` places of each row, by its weights: those that come first in a race of exponential waiting times.

    With replacement, where as many uniform numbers fall among the running sums of the weights.
    """
    if not replacement and count > weights.shape[-1]:
        raise RuntimeError(f"multinomial cannot draw {count} of {weights.shape[-1]} places without replacement")
    valid = ((weights >= 0) & weights.isfinite()).all() & (weights.sum(-1) > 0).all()
    torch._assert_async(valid, "multinomial expects weights that are finite and not negative, with a sum above 0")
    if not replacement or count == 1:
        waits = torch.empty_like(weights).exponential_(generator=generator)
        return (weights / waits).topk(count, -1)[1]
    sums = weights.double().cumsum(-1)
    sums = sums / sums[..., -1:]
    drawn = sums[..., :1].expand(*sums.shape[:-1], count).contiguous()
    return torch.searchsorted(sums, drawn.uniform_(generator=generator), right=True)


def _slopes(x: torch.Tensor, lower: Any, upper: Any, *, is_training: bool, generator: Any) -> torch.Tensor | None:
    """What multiplies each element; None where it is not random."""
    if not is_training:
        return None
    drawn = torch.empty_like(x).uniform_(lower, upper, generator=generator)
    return torch.where(x <= 0, drawn, torch.ones_like(x))


def leaky(
    x: torch.Tensor,
    noise: torch.Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """rrelu: elements up to 0 are multiplied with numbers of their own, which `noise` keeps for the gradient."""
    slopes = _slopes(x, lower, upper, is_training=training, generator=generator)
    if slopes is None:
        return torch.nn.functional.leaky_relu(x, (lower + upper) / 2)
    return x * noise.copy_(slopes)


def leaky_in_place(x: torch.Tensor, *args: Any) -> torch.Tensor:
    """The same, written to its argument."""
    return x.copy_(leaky(x, *args))


def leaky_functional(x: torch.Tensor, noise: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, with the noise as a second result."""
    kept = noise.clone()
    return leaky(x, kept, *args), kept
