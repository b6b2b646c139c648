"""Comparison of plain parameters' gradients among ranks: those that differ are named, with what to write."""

import hashlib

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tritondt.comm.objects import bytes_of
from tritondt.dtensor.tensor import DTensor
from tritondt.errors import DifferenceError, MeshError
from tritondt.errors.arguments import check_types, checked
from tritondt.redistribution.agreement import lengths_on_all
from tritondt.redistribution.refusals import refusing_comparison
from tritondt.sharding.mesh import Mesh, canonical_mesh

_DIGEST_BYTES = 8
# Names that an error shows.
_MAX_NAMES = 8


@checked
def check_plain_gradients(module: nn.Module, mesh: "DeviceMesh | Mesh | None" = None) -> None:
    """Compares the gradients of a module's plain parameters among the ranks of `mesh`, bit by bit.

    A collective call, for after backward: one exchange of 8 bytes a parameter and rank. A plain parameter of a
    parallelized module must be the same on every rank. Where a rank uses it on its own heads or positions alone, its
    gradient is only a term, and the ranks' parameters drift apart. `mesh` defaults to that of the distributed
    parameters. Parameters without a gradient count as equal.

    Raises DifferenceError on all ranks, which names such parameters and the style that sums their terms; MeshError
    without a mesh.

    >>> import tritondt as T
    >>> from tritondt.comm.transports.threads import run_ranks
    >>> def found_on(rank):
    ...     norm = nn.LayerNorm(4)
    ...     norm(torch.arange(4.0) * (rank + 1)).sum().backward()
    ...     try:
    ...         check_plain_gradients(norm, T.Mesh((2,)))
    ...     except DifferenceError as error:
    ...         return str(error).split("; ")[0]
    >>> print(run_ranks(2, found_on)[0])
    gradients of plain parameters differ between rank 0 and rank 1: weight
    """
    found = _mesh_of(module) if mesh is None else canonical_mesh(mesh)
    with refusing_comparison(found):
        check_types(check_plain_gradients, module=module)
        plain = {name: value for name, value in module.named_parameters() if not isinstance(value, DTensor)}
        digests = lengths_on_all(found, list(map(_digest, plain.values())))
    if found.coordinate is None:
        return
    for rank, of_rank in zip(found.ranks, digests, strict=True):
        names = [name for name, own, first in zip(plain, of_rank, digests[0], strict=True) if own != first]
        if names:
            more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
            raise DifferenceError(
                f"gradients of plain parameters differ between rank {found.ranks[0]} and rank {rank}: "
                f"{', '.join(names[:_MAX_NAMES])}{more}; each rank uses them on its own part, and they will drift "
                "apart: name their modules in the plan, by SequenceParallel(sequence_dim=dim, use_local_output=True) "
                "with the dim of heads or positions that is cut, which sums the terms, or sum the gradients yourself"
            )


def _mesh_of(module: nn.Module) -> Mesh:
    for parameter in module.parameters():
        if isinstance(parameter, DTensor):
            return parameter._spec.mesh
    raise MeshError(f"check_plain_gradients found no distributed parameter in {type(module).__name__}; give it a mesh")


def _digest(parameter: torch.Tensor) -> int:
    """A number of a gradient's bits; 0 without a gradient."""
    grad = parameter.grad
    if grad is None:
        return 0
    if isinstance(grad, DTensor):
        grad = grad.full_tensor()
    content = bytes_of(grad.detach().to_dense())
    return int.from_bytes(hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest(), "little", signed=True)
