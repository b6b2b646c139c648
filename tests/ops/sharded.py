"""Runs a function on plain tensors and on distributed ones, on thread ranks, and compares everything."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple, cast

import torch

import tritondt as T
from tests.harness.oracle.arithmetic import indices_of, take
from tritondt.comm.transports.threads import run_ranks
from tritondt.sharding.placement import parse_placements


class Case(NamedTuple):
    """Tensors of a call with the placements of each as text, on a mesh of `mesh_shape`."""

    mesh_shape: tuple[int, ...]
    tensors: Sequence[torch.Tensor]
    placements: Sequence[str]
    order: tuple[int, ...] | None = None


def distribute(full: torch.Tensor, mesh: T.Mesh, text: str, order: Sequence[int] | None = None) -> T.DTensor:
    """This rank's part of a whole tensor, cut with index_select; terms of a sum or mean differ."""
    spec = T.DTensorSpec(mesh, parse_placements(text), T.TensorMeta.contiguous(full.shape, full.dtype), order)
    coordinate = mesh.coordinate
    assert coordinate is not None, "every rank is in the mesh"
    local = take(full.detach(), indices_of(spec.layout, coordinate))
    for size, index, placement in zip(mesh.shape, coordinate, spec.placements, strict=True):
        if placement.is_partial():
            # Terms differ, so that a reduction left out or done twice is seen.
            local = local * (2 * (index + 1)) / ((size if placement.is_partial("sum") else 1) * (size + 1))
    return T.DTensor.from_local(local.contiguous(), mesh, spec.placements, shape=spec.shape, order=spec.order)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of what an operator gave."""
    assert isinstance(tensor, T.DTensor), f"{type(tensor)} is no DTensor"
    return cast(T.DTensor, tensor.detach()).full_tensor()


def placements_of(tensor: torch.Tensor) -> tuple[T.Placement, ...]:
    """How what an operator gave is laid out."""
    assert isinstance(tensor, T.DTensor), f"{type(tensor)} is no DTensor"
    return tensor.placements


def compare(found: Any, expected: Any, *, exact: bool = False, what: str = "result") -> None:
    """Whether a result is what it is on one device: value, shape, dtype and stride."""
    if isinstance(expected, list | tuple):
        assert len(found) == len(expected), f"{what}: {len(found)} items, expected {len(expected)}"
        for place, (item, of) in enumerate(zip(found, expected, strict=True)):
            compare(item, of, exact=exact, what=f"{what}[{place}]")
        return
    if not isinstance(expected, torch.Tensor):
        assert found == expected, f"{what}: {found}, expected {expected}"
        return
    assert isinstance(found, T.DTensor), f"{what}: {type(found)} is no DTensor"
    assert found.shape == expected.shape, f"{what}: shape {found.shape}, expected {expected.shape}"
    tolerance = 0.0 if exact else None
    torch.testing.assert_close(
        whole(found),
        expected.detach(),
        rtol=tolerance,
        atol=tolerance,
        msg=lambda text: f"{what}, {found._spec}: {text}",
    )


def check(
    function: Callable[..., Any],
    case: Case,
    *,
    gradients: bool = False,
    exact: bool = False,
    expect: str | None = None,
    strides: bool = True,
) -> None:
    """Compares `function` of the plain tensors with that of the distributed ones, and their gradients.

    `expect` is the text of the placements that the (first) result must have.
    """
    full = [tensor.clone().requires_grad_(gradients and tensor.is_floating_point()) for tensor in case.tensors]
    expected = function(*full)
    seeds = _backward(expected, full) if gradients else []

    def body(rank: int) -> None:
        mesh = T.Mesh(case.mesh_shape)
        mine = [
            distribute(tensor, mesh, text, case.order)
            for tensor, text in zip(case.tensors, case.placements, strict=True)
        ]
        for tensor, of in zip(mine, full, strict=True):
            tensor.requires_grad_(of.requires_grad)
        found = function(*mine)
        compare(found, expected, exact=exact)
        first = found[0] if isinstance(found, list | tuple) else found
        of_first = expected[0] if isinstance(expected, list | tuple) else expected
        if expect is not None:
            assert first._spec.placements == parse_placements(expect), f"{first._spec}, expected {expect}"
        if strides and isinstance(of_first, torch.Tensor):
            assert first.stride() == of_first.stride(), f"stride {first.stride()}, expected {of_first.stride()}"
        if gradients:
            outputs = [item for item in _tensors(found) if item.requires_grad]
            grads = [distribute(seed, mesh, ", ".join("R" for _ in case.mesh_shape)) for seed in seeds]
            torch.autograd.backward(outputs, grads)
            for place, (tensor, of) in enumerate(zip(mine, full, strict=True)):
                if of.requires_grad:
                    compare(tensor.grad, of.grad, what=f"gradient {place}")

    run_ranks(prod(case.mesh_shape), body)


def check_derivatives(function: Callable[..., torch.Tensor], case: Case, *, second: bool = True) -> None:
    """Holds first and second derivatives (fp64) against finite differences of the whole tensors.

    Every rank perturbs the same whole tensors in step with the others.
    """

    def body(rank: int) -> None:
        mesh = T.Mesh(case.mesh_shape)

        def of_whole(*full: torch.Tensor) -> torch.Tensor:
            mine = []
            for tensor, text in zip(full, case.placements, strict=True):
                replicated = T.DTensor.from_local(tensor, mesh)
                mine.append(replicated.redistribute(placements=parse_placements(text), order=case.order))
            return cast(T.DTensor, function(*mine)).full_tensor()

        full = [tensor.clone().requires_grad_(tensor.is_floating_point()) for tensor in case.tensors]
        assert torch.autograd.gradcheck(of_whole, full)
        if second:
            # Its own choice would be another on every rank.
            seed = torch.linspace(-1, 1, of_whole(*full).numel(), dtype=torch.float64).view(of_whole(*full).shape)
            assert torch.autograd.gradgradcheck(of_whole, full, [seed.requires_grad_()])

    run_ranks(prod(case.mesh_shape), body)


def _tensors(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return [tensor for item in result for tensor in _tensors(item)] if isinstance(result, list | tuple) else []


def _backward(expected: Any, full: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    outputs = [item for item in _tensors(expected) if item.requires_grad]
    generator = torch.Generator().manual_seed(7)
    seeds = [torch.randn(output.shape, generator=generator, dtype=output.dtype) for output in outputs]
    torch.autograd.backward(outputs, seeds)
    return seeds
