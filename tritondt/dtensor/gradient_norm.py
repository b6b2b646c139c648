"""`clip_grad_norm_`: the norm of the gradients of parameters on one mesh or several, and their clipping by it."""

from collections.abc import Iterable
from typing import cast

import torch
from torch.nn.utils import clip_grad

from tritondt.dtensor.many import Move, redistribute_many
from tritondt.dtensor.tensor import DTensor
from tritondt.errors import MixedTensorsError, PeerError, check_not_of_torch
from tritondt.errors.arguments import check_types, checked
from tritondt.ops.propagation.replication import are_replicated
from tritondt.redistribution.many import refuse_many
from tritondt.redistribution.refusals import refuse_redistribution
from tritondt.redistribution.run import check_memory
from tritondt.sharding.mesh import Mesh
from tritondt.sharding.placement import Partial, Replicate
from tritondt.sharding.spec import DTensorSpec, TensorMeta


@torch.no_grad()
@checked
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scales gradients down to `max_norm` in place, and returns the norm of all of them, a plain tensor without dims.

    It is torch.nn.utils.clip_grad_norm_ for distributed parameters on any number of meshes. A rank may be in only some
    of the meshes; a gradient counts once, however many ranks hold it. A collective call of all ranks of all the meshes,
    with parameters in the same order. Within `implicit_replication()` plain gradients count once as well. Raises
    MixedTensorsError for a plain gradient elsewhere and, on all ranks, RuntimeError for a norm that is not finite
    if `error_if_nonfinite` is set.

    >>> import tritondt as T
    >>> from tritondt.comm.transports.threads import run_ranks
    >>> def norm_on(rank):
    ...     first, second = (torch.nn.Parameter(T.ones(2, device_mesh=T.Mesh((1,), ranks=(at,)))) for at in (0, 1))
    ...     first.grad, second.grad = 3 * first.detach(), 4 * second.detach()
    ...     return T.clip_grad_norm_([first, second], 1.0).item()
    >>> [round(norm, 3) for norm in run_ranks(2, norm_on)]
    [7.071, 7.071]
    """
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    of_mesh, plain, wrong = _gradients(given)
    try:
        check_types(clip_grad_norm_, max_norm=max_norm, norm_type=norm_type)
        if wrong is not None:
            raise wrong
    except Exception as error:
        _refuse_norms(of_mesh, 0, error)
        raise
    if not of_mesh and not plain:
        return torch.tensor(0.0)
    norms = []
    for place, found in enumerate(of_mesh.values()):
        try:
            norms.append(_norm(found, norm_type, foreach))
        except PeerError as error:
            _refuse_norms(of_mesh, place + 1, error)
            raise
    total = _combined(norms, [_norm(plain, norm_type, foreach)] if plain else [], norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the norm of order {norm_type} of gradients is {total.item()}, and cannot be clipped; pass "
            "error_if_nonfinite=False to scale them by it all the same"
        )
    for mesh, found in of_mesh.items():
        on_mesh = total if mesh.coordinate is not None else total.new_empty(0)
        clip_grad._clip_grads_with_norm_(found, max_norm, _replicated(on_mesh, mesh), foreach)
    clip_grad._clip_grads_with_norm_(plain, max_norm, total, foreach)
    return total


def _gradients(
    given: list[torch.Tensor],
) -> tuple[dict[Mesh, list[torch.Tensor]], list[torch.Tensor], Exception | None]:
    """Parameters with distributed gradients by mesh, those with plain ones, and what is wrong with one of them."""
    of_mesh: dict[Mesh, list[torch.Tensor]] = {}
    plain: list[torch.Tensor] = []
    wrong: Exception | None = None
    for parameter in given:
        gradient = getattr(parameter, "grad", None)
        if isinstance(gradient, DTensor):
            of_mesh.setdefault(gradient._spec.mesh, []).append(parameter)
        elif gradient is not None:
            plain.append(parameter)
        try:
            _check_gradient(parameter)
        except Exception as error:  # noqa: BLE001  raised when it is known whom to tell
            wrong = wrong or error
    return of_mesh, plain, wrong


def _check_gradient(parameter: torch.Tensor) -> None:
    """MixedTensorsError for a plain gradient where these do not count, LocalTensorError for one without memory."""
    gradient = parameter.grad
    if gradient is None:
        return
    check_not_of_torch(gradient, "clip_grad_norm_")
    if isinstance(gradient, DTensor):
        check_memory(gradient._local_tensor, "clip_grad_norm_")
    elif not are_replicated():
        raise MixedTensorsError(
            f"clip_grad_norm_ was given a plain gradient of shape {tuple(gradient.shape)}; allowed are distributed "
            "ones: make the parameter distributed, replicated where every rank holds all of it, or call "
            "clip_grad_norm_ within tritondt.implicit_replication() where plain gradients are alike on every rank"
        )


def _refuse_norms(of_mesh: dict[Mesh, list[torch.Tensor]], first: int, error: Exception) -> None:
    """Tells the others why this rank adds up no numbers of the gradients on meshes from number `first` on.

    Nor does it take part where the norms of several meshes come together.
    """
    for mesh, parameters in list(of_mesh.items())[first:]:
        found = [cast(DTensor, parameter.grad)._spec.placements for parameter in parameters]
        whole = [all(each.is_replicate() for each in of_axis) for of_axis in zip(*found, strict=True)]
        terms = [Replicate() if is_whole else Partial() for is_whole in whole]
        source = DTensorSpec(mesh, terms, TensorMeta.contiguous((len(parameters),), torch.float64))
        refuse_redistribution(source, source.with_placements([Replicate()] * mesh.ndim), error)
    if of_mesh:
        meta = TensorMeta.contiguous(())
        norms = [DTensorSpec(mesh, [Replicate()] * mesh.ndim, meta) for mesh in of_mesh]
        together = DTensorSpec(_everywhere(list(of_mesh)), [Replicate()], meta)
        refuse_many(tuple((norm, together) for norm in norms), error)


def _everywhere(meshes: list[Mesh]) -> Mesh:
    """Mesh of one axis of all ranks of the meshes."""
    ranks = sorted({rank for mesh in meshes for rank in mesh.ranks})
    return Mesh((len(ranks),), ranks=ranks, device_type=meshes[0].device_type)


def _norm(parameters: list[torch.Tensor], norm_type: float, foreach: bool | None) -> torch.Tensor:
    return clip_grad._get_total_norm([cast(torch.Tensor, x.grad) for x in parameters], norm_type, False, foreach)


def _replicated(total: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    return DTensor.from_local(total, mesh, [Replicate()] * mesh.ndim, shape=(), stride=())


def _combined(norms: list[torch.Tensor], plain: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """The norm of norms on several meshes, and of plain ones, on every rank of any of the meshes."""
    dtype = (norms + plain)[0].dtype
    for norm in norms + plain:
        dtype = torch.promote_types(dtype, norm.dtype)
    found = [norm.to(dtype) for norm in plain]
    if norms:
        mesh = _everywhere([cast(DTensor, norm)._spec.mesh for norm in norms])
        moves: list[Move] = [(cast(DTensor, norm.to(dtype)), mesh, [Replicate()]) for norm in norms]
        found += [norm.to_local() for norm in redistribute_many(moves)]
    return found[0] if len(found) == 1 else torch.linalg.vector_norm(torch.stack(found), norm_type)
