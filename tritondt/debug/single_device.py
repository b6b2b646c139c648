"""Comparison of every operator of a function on distributed tensors with one device; the first that differs is
named.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tritondt.comm.monitor.call_site import calling_line
from tritondt.dtensor.tensor import DTensor
from tritondt.errors import DifferenceError
from tritondt.errors.arguments import first
from tritondt.redistribution.agreement import lengths_on_all
from tritondt.redistribution.run import redistribute_local
from tritondt.sharding.placement import Replicate
from tritondt.sharding.spec import DTensorSpec


class _Tolerance(NamedTuple):
    """Tolerances of torch.testing.assert_close: both or none."""

    rtol: float | None
    atol: float | None


@first("rtol", "atol")  # they are used where an operator's results differ
def check_against_single_device(
    function: Callable[..., Any], *args: Any, rtol: float | None = None, atol: float | None = None, **kwargs: Any
) -> Any:
    """Returns `function(*args, **kwargs)`, after comparing every operator that it calls with one device.

    A collective call. The arguments of each operator are gathered, and the operator runs on these as well. Its results,
    and the tensors that it wrote to, must be equal within `rtol` and `atol` (those of torch.testing.assert_close). The
    error therefore names the first wrong operator and the line that called it, not its consequences, also in a backward
    pass within the function. Operators that draw random numbers, or return uninitialized memory, are not compared.

    Raises DifferenceError, on all ranks.

    >>> import tritondt as T
    >>> from tritondt.comm.transports.threads import run_ranks
    >>> def sum_on(rank):
    ...     x = T.DTensor.from_local(torch.ones(2, 2), T.Mesh((2,)), (T.Shard(0),))
    ...     return T.debug.check_against_single_device(lambda: (x + x).sum()).full_tensor().item()
    >>> run_ranks(2, sum_on)
    [16.0, 16.0]
    """
    with _Check(_Tolerance(rtol, atol)):
        return function(*args, **kwargs)


class _Check(TorchDispatchMode):
    """Dispatch mode that runs every operator twice."""

    def __init__(self, tolerance: _Tolerance) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tolerance = tolerance

    def __torch_dispatch__(
        self, op: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Result of the operator on distributed tensors, once it was compared."""
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
    """Whether an operator gives equal values at every call."""
    return torch.Tag.nondeterministic_seeded not in op.tags and "empty" not in op._schema.name.partition("::")[2].split(
        "_"
    )


def _whole(tensor: DTensor) -> torch.Tensor:
    """Copy of the whole tensor, with the strides of the tensor on one device."""
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
    """Raises DifferenceError on all ranks where any rank finds a difference."""
    differences = [text for found, expected in pairs for text in _difference(found, expected, tolerance)]
    mesh = next(found._spec.mesh for found, _ in pairs if isinstance(found, DTensor))
    counts = lengths_on_all(mesh, [len(differences)])
    ranks = [rank for rank, (count,) in zip(mesh.ranks, counts, strict=True) if count]
    if ranks:
        text = differences[0] if differences else "this rank sees no difference"
        raise DifferenceError(f"{what} differs from one device on ranks {ranks}: {text}")


def _difference(found: Any, expected: Any, tolerance: _Tolerance) -> Iterator[str]:
    """Text of a difference, if there is one; the tensors of a rank outside the mesh are compared by others."""
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
