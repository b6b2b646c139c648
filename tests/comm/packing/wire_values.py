"""Values for messages of another dtype than their tensor's, and what torch makes of them there and back."""

import torch

from tritondt.comm.packing.wire_dtype import is_scaled


def rounded(x: torch.Tensor, wire_dtype: torch.dtype) -> torch.Tensor:
    """What torch's casts give; to fp8 in the middle of its range, as a scale puts numbers of like size."""
    if is_scaled(wire_dtype):
        return (x.float() * 16).to(wire_dtype).float().div(16).to(x.dtype)
    return x.to(wire_dtype).to(x.dtype)


def equal(found: torch.Tensor, expected: torch.Tensor, text: str = "") -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True, msg=lambda said: f"{text}: {said}")


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Of all sizes, a few too large or too small for any wire dtype, infinite, or none."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(shape, generator=generator, dtype=dtype)
    found *= torch.pow(2.0, torch.randint(-30, 20, shape, generator=generator))
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 3e38, -1e-40, 65519.9, 1e-7], dtype=dtype)
    places = torch.randint(0, 40, shape, generator=generator)
    return torch.where(places < len(odd), odd[places.clamp(max=len(odd) - 1)], found)


def of_like_size(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Zeros, and numbers of both signs between 1/8 and 1: a power of two as a scale does not change how they round."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.rand(shape, generator=generator, dtype=torch.float64) * 7 / 8 + 1 / 8
    return (found * torch.randint(-1, 2, shape, generator=generator)).to(dtype)
