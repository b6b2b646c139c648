"""Losses of routers over the tokens of all ranks, which are no sums of what each rank has."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.device_mesh import DeviceMesh

from tritondt.errors import LocalTensorError
from tritondt.errors.arguments import check_types, checked
from tritondt.parallel.boundary import activation_spec
from tritondt.redistribution.autograd import redistribute
from tritondt.redistribution.refusals import refuse_redistribution
from tritondt.sharding.mesh import Mesh, canonical_mesh
from tritondt.sharding.placement import Partial, Replicate
from tritondt.sharding.spec import DTensorSpec

# Experts where their number is unknown; a sum of so many numbers, or of more, goes in as many exchanges as any.
_USUAL_EXPERTS = 64


@checked
def load_balancing_loss(logits: torch.Tensor, indices: torch.Tensor, device_mesh: "DeviceMesh | Mesh") -> torch.Tensor:
    """Loss that is minimal where the tokens of all ranks are spread evenly over the experts: experts * sum(share *
    probability).

    `logits` (tokens, experts) are those of this rank, and `indices` (tokens, choices) the experts of its tokens; ranks
    may have any number of tokens. The share of an expert is its share of the choices of all ranks, and its probability
    the mean over their tokens. For one choice this is the Switch Transformer's loss; transformers' Mixtral multiplies
    it by the number of choices. Every rank gets the loss of all tokens, and the gradient of its own logits. Gradients
    of a router that are summed over the ranks (`ReplicateParallel(input_layouts=Shard(0))`) therefore equal those of
    one process. Where they are averaged, as under `fully_shard`, multiply the loss by the number of ranks. A collective
    call of the mesh, one redistribution. Raises LocalTensorError for tensors of other shapes.

    >>> from tritondt.comm.transports.threads import run_ranks
    >>> def loss_on(rank):
    ...     logits = torch.tensor([[[2.0, 0.0]], [[0.0, 2.0]]][rank])
    ...     return round(load_balancing_loss(logits, logits.topk(1).indices, Mesh((2,))).item(), 3)
    >>> run_ranks(2, loss_on)  # each rank's own would be 1.762
    [1.0, 1.0]
    """
    with _telling(device_mesh, _num_terms(logits)):
        check_types(load_balancing_loss, logits=logits, indices=indices)
        terms = _load_terms(logits, indices)
    num_experts = logits.shape[1]
    probabilities, chosen, num_tokens = _summed(terms, device_mesh).split([num_experts, num_experts, 1])
    # A mesh without any token has no loss, not 0 / 0.
    shares = chosen / chosen.sum().clamp(min=1)
    loss: torch.Tensor = num_experts * (shares * probabilities).sum() / num_tokens.squeeze(0).clamp(min=1)
    return loss


def _num_terms(logits: object) -> int:
    """Numbers that are summed for a balance over the experts of some logits, or of what was given for them."""
    is_known = isinstance(logits, torch.Tensor) and logits.ndim
    return 2 * (logits.shape[-1] if is_known else _USUAL_EXPERTS) + 1  # type: ignore[attr-defined]


def _load_terms(logits: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """This rank's probabilities and choices of every expert, and its number of tokens."""
    _check(logits)
    if indices.ndim != 2 or indices.shape[0] != logits.shape[0] or indices.is_floating_point():
        raise LocalTensorError(
            f"load_balancing_loss got indices {tuple(indices.shape)} of {indices.dtype} for logits "
            f"{tuple(logits.shape)}; allowed are integers (tokens, choices)"
        )
    num_experts = logits.shape[1]
    counts = torch.bincount(indices.flatten(), minlength=num_experts).to(logits.dtype)
    if len(counts) > num_experts:
        raise LocalTensorError(
            f"load_balancing_loss got the index {len(counts) - 1} for {num_experts} experts; allowed are "
            f"0..{num_experts - 1}"
        )
    return torch.cat([logits.softmax(-1).sum(0), counts, counts.new_tensor([logits.shape[0]])])


@checked
def router_z_loss(logits: torch.Tensor, device_mesh: "DeviceMesh | Mesh") -> torch.Tensor:
    """Mean, over the tokens of all ranks, of the squared logsumexp of the logits, which keeps a router's scores small.

    `logits` (tokens, experts) are those of this rank, with any number of tokens. Values and gradients are those that
    `load_balancing_loss` describes. A collective call of the mesh, one redistribution. Raises LocalTensorError for
    tensors of other dims.

    >>> from tritondt.comm.transports.threads import run_ranks
    >>> run_ranks(2, lambda rank: round(router_z_loss(torch.full((rank, 1), 3.0), Mesh((2,))).item(), 3))
    [9.0, 9.0]
    """
    with _telling(device_mesh, 2):
        check_types(router_z_loss, logits=logits)
        _check(logits)
        squares = logits.logsumexp(-1).square().sum()
        terms = torch.stack([squares, squares.new_tensor(float(logits.shape[0]))])
    total, num_tokens = _summed(terms, device_mesh)
    loss: torch.Tensor = total / num_tokens.clamp(min=1)
    return loss


def _check(logits: torch.Tensor) -> None:
    if logits.ndim != 2 or not logits.is_floating_point():
        raise LocalTensorError(
            f"a router's loss got logits {tuple(logits.shape)} of {logits.dtype}; allowed are floating point numbers "
            "(tokens, experts)"
        )


@contextmanager
def _telling(device_mesh: "DeviceMesh | Mesh", num_terms: int) -> Iterator[None]:
    """Context of a rank's terms: the others, who wait for their sum, hear why there are none."""
    try:
        yield
    except Exception as error:
        refuse_redistribution(*_specs(canonical_mesh(device_mesh), (num_terms,), torch.float32), error)
        raise


def _specs(mesh: Mesh, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[DTensorSpec, DTensorSpec]:
    return activation_spec(mesh, Partial(), shape, dtype), activation_spec(mesh, Replicate(), shape, dtype)


def _summed(terms: torch.Tensor, device_mesh: "DeviceMesh | Mesh") -> torch.Tensor:
    """Sums over the ranks of a list of numbers; the gradient of a term is that of its sum."""
    return redistribute(terms, *_specs(canonical_mesh(device_mesh), tuple(terms.shape), terms.dtype))
