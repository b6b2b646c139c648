"""Runs every operator of a function on distributed tensors and on one device, and names the first that differs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tritondt.comm.monitor.call_site import calling_line
from tritondt.dtensor.tensor import DTensor
from tritondt.errors import DifferenceError
from tritondt.redistribution.agreement import lengths_on_all
from tritondt.redistribution.run import redistribute_local
from tritondt.sharding.placement import Replicate
from tritondt.sharding.spec import DTensorSpec


class _Tolerance(NamedTuple):
    """As torch.testing.assert_close takes them: both or none."""

    rtol: float | None
    atol: float | None


def check_against_single_device(
    function: Callable[..., Any], *args: Any, rtol: float | None = None, atol: float | None = None, **kwargs: Any
) -> Any:
    """What `function` gives, after every operator that it called was held against the same on one device.

    A collective call. The arguments of each operator are gathered, it runs on these as well, and its results, and what
    it wrote to, must be the same within `rtol` and `atol` (those of torch.testing.assert_close). So the first operator
    that is laid out wrongly is named, with the line that called it, and not what comes of it; in a backward pass within
    the function, too. Operators that draw random numbers, or give memory as it is, are not compared. DifferenceError,
    on all ranks.

        check_against_single_device(lambda: loss(model(x), y).backward())
    """
    with _Check(_Tolerance(rtol, atol)):
        return function(*args, **kwargs)


class _Check(TorchDispatchMode):
    """Runs what is called twice."""

    def __init__(self, tolerance: _Tolerance) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tolerance = tolerance

    def __torch_dispatch__(
        self, op: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What the operator gives for distributed tensors."""
        given = kwargs or {}
        distributed = [leaf for leaf in tree_leaves((args, given)) if isinstance(leaf, DTensor)]
        if not distributed or not _is_determined(op):
            return op(*args, **given)
        what = f"{op}({', '.join(str(tensor._spec) for tensor in distributed)}), called at {calling_line()},"
        whole_args, whole_kwargs = tree_map_only(DTensor, _whole, (args, given))
        result = op(*args, **given)
        expected = op(*whole_args, **whole_kwargs)
        # What is written to is among the arguments.
        pairs = [*_pairs(result, expected), *_pairs((args, given), (whole_args, whole_kwargs))]
        _compare(pairs, what, self._tolerance)
        return result


def _is_determined(op: OpOverload) -> bool:
    """Whether an operator gives the same values at every call."""
    return torch.Tag.nondeterministic_seeded not in op.tags and "empty" not in op._schema.name.partition("::")[2].split(
        "_"
    )


def _whole(tensor: DTensor) -> torch.Tensor:
    """A copy of the whole tensor, with the strides that it has on one device."""
    spec = tensor._spec
    replicated = spec.with_placements([Replicate()] * spec.mesh.ndim)
    found = redistribute_local(tensor._local_tensor.detach(), spec, replicated)
    if spec.coordinate is None or 0 in spec.tensor_meta.stride:
        return found.clone()
    made = torch.empty_strided(spec.shape, spec.tensor_meta.stride, dtype=spec.dtype, device=found.device)
    return made.copy_(found)


def _pairs(found: Any, expected: Any) -> list[tuple[Any, Any]]:
    results, references = tree_leaves(found), tree_leaves(expected)
    return (
        list(zip(results, references, strict=True))
        if len(results) == len(references)
        else [(len(results), len(references))]
    )


def _compare(pairs: Sequence[tuple[Any, Any]], what: str, tolerance: _Tolerance) -> None:
    """Raises on all ranks where any rank finds a difference."""
    differences = [text for found, expected in pairs for text in _difference(found, expected, tolerance)]
    mesh = next(found._spec.mesh for found, _ in pairs if isinstance(found, DTensor))
    counts = lengths_on_all(mesh, [len(differences)])
    ranks = [rank for rank, (count,) in zip(mesh.ranks, counts, strict=True) if count]
    if ranks:
        text = differences[0] if differences else "this rank sees no difference"
        raise DifferenceError(f"{what} differs from one device on ranks {ranks}: {text}")


def _difference(found: Any, expected: Any, tolerance: _Tolerance) -> Iterator[str]:
    """In words, if there is one; what a rank outside the mesh holds is compared by others."""
    if not isinstance(found, DTensor):
        if isinstance(expected, torch.Tensor) and not isinstance(found, torch.Tensor):
            yield f"a {type(found).__name__}, expected a tensor"
        elif not isinstance(found, torch.Tensor) and found != expected and found == found:
            yield f"{found}, expected {expected}"
        return
    spec: DTensorSpec = found._spec
    local = tuple(found._local_tensor.shape)
    if local != spec.local_shape:
        yield f"a local tensor of shape {local} under {spec}, which has {spec.local_shape} here"
        return
    whole = _whole(found)
    if spec.coordinate is None:
        return
    try:
        torch.testing.assert_close(whole, expected, rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True)
    except AssertionError as error:
        yield f"{spec}: {' '.join(str(error).split())}"
