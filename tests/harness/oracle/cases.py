"""Random redistributions, each written as one line that runs it again: `check_case(Case(...))`."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

import tritondt as T
from tests.harness.oracle import arithmetic
from tests.harness.oracle.random_layouts import MESH_SHAPES, random_placements, random_shape
from tritondt.comm.transports.threads import run_ranks
from tritondt.errors import PeerError
from tritondt.planning.cost import CostTable
from tritondt.sharding.placement import placements_text

DTYPES = (
    "float32", "float64", "float16", "bfloat16", "int8", "uint8", "int16", "int32", "int64", "bool", "complex64",
    "complex128",
)  # fmt: skip
parsed = lru_cache(maxsize=1024)(T.parse_placements)

STORAGES = ("dense", "dense", "transposed", "strided", "expanded", "negated", "conjugated")


@dataclass(frozen=True)
class Case:
    """One redistribution; `storage` says how the local tensors lie in memory, `grad` what their gradient will be."""

    seed: int
    mesh_shape: tuple[int, ...]
    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    source: str
    target: str
    source_order: tuple[int, ...] | None = None
    target_order: tuple[int, ...] | None = None
    storage: str = "dense"
    grad: str | None = None

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        found = getattr(torch, self.dtype)
        assert isinstance(found, torch.dtype)
        return found

    @property
    def differentiable(self) -> bool:
        """Whether backward is defined: floats and complex, sums and means."""
        return self.grad is not None


def random_case(seed: int, world_size: int, *, scattered: bool = True) -> Case:
    """The case of a seed; its mesh takes some or all ranks of a world, in any order.

    Not `scattered`, it takes the first ranks: every other set of ranks needs connections of its own.
    """
    chosen = random.Random(seed)
    # Small meshes leave ranks outside; large ones have more to go wrong.
    size = max(chosen.randint(1, world_size), chosen.randint(1, world_size))
    mesh_shape = chosen.choice(MESH_SHAPES[size])
    among = range(world_size if scattered else size)
    ranks = list(range(size)) if chosen.random() < 0.7 else chosen.sample(among, size)
    shape = random_shape(chosen)
    dtype = chosen.choice(DTYPES)
    source, source_order = random_placements(chosen, mesh_shape, shape, getattr(torch, dtype))
    target, target_order = random_placements(chosen, mesh_shape, shape, getattr(torch, dtype))
    storage = chosen.choice(STORAGES)
    if (storage, getattr(torch, dtype).is_complex) == ("conjugated", False) or (storage, dtype) == ("negated", "bool"):
        storage = "dense"
    return Case(
        seed,
        mesh_shape,
        tuple(ranks),
        shape,
        dtype,
        placements_text(source),
        placements_text(target),
        source_order,
        target_order,
        storage,
        _random_grad(chosen, source, target, getattr(torch, dtype)),
    )


def _random_grad(
    chosen: random.Random,
    source: tuple[T.Placement, ...],
    target: tuple[T.Placement, ...],
    dtype: torch.dtype,
) -> str | None:
    """Placements of the gradient of the result, where there is one: as the target, any term replicated or not."""
    ops = {placement.reduce_op for placement in (*source, *target) if isinstance(placement, T.Partial)}
    if not (dtype.is_floating_point or dtype.is_complex) or not ops <= {"sum", "avg"}:
        return None
    grad: list[T.Placement] = []
    for placement in target:
        as_terms = chosen.random() < 0.3 and not placement.is_partial("avg")
        if placement.is_shard():
            grad.append(placement)
        else:
            grad.append(T.Partial(chosen.choice(("sum", "avg"))) if as_terms else T.Replicate())
    return placements_text(grad)


class Inputs(NamedTuple):
    """The whole tensor and gradient of a case, and what each coordinate is given of both."""

    full: torch.Tensor
    locals: dict[arithmetic.Coordinate, torch.Tensor]
    grad: torch.Tensor | None
    local_grads: dict[arithmetic.Coordinate, torch.Tensor]


class Outcome(NamedTuple):
    """What a rank got: the result, and the gradient of its input where there is one."""

    result: torch.Tensor
    grad: torch.Tensor | None


def inputs_of(case: Case) -> Inputs:
    """What goes into a case, the same whoever computes it."""
    generator = torch.Generator().manual_seed(case.seed)
    full = _whole(case, generator)
    source, target = parsed(case.source), parsed(case.target)
    given = arithmetic.local_tensors(full, case.mesh_shape, source, case.source_order, generator)
    if case.grad is None:
        return Inputs(full, given, None, {})
    # A term of a mean of n has 1/n of the mean's gradient, which is therefore n times what arrives.
    grad = _whole(case, generator)
    placements = parsed(case.grad)
    arriving = arithmetic.local_tensors(grad, case.mesh_shape, placements, case.target_order, generator)
    return Inputs(full, given, grad * arithmetic.mean_size(case.mesh_shape, target), arriving)


def _whole(case: Case, generator: torch.Generator) -> torch.Tensor:
    if case.storage != "expanded" or not case.shape or case.shape[0] < 2:
        return arithmetic.whole_tensor(case.shape, case.torch_dtype, generator)
    return arithmetic.whole_tensor((1, *case.shape[1:]), case.torch_dtype, generator).expand(case.shape)


def run_case(case: Case, inputs: Inputs, rank: int, device_type: str = "cpu") -> Outcome:
    """This rank's part of a case, and what must hold on every rank: no alias, and the input as it was."""
    mesh = T.Mesh(case.mesh_shape, ranks=case.ranks, device_type=device_type)
    meta = T.TensorMeta.contiguous(case.shape, case.torch_dtype)
    source = T.DTensorSpec(mesh, parsed(case.source), meta, case.source_order)
    target = T.DTensorSpec(mesh, parsed(case.target), meta, case.target_order)
    if rank not in case.ranks:
        assert mesh.coordinate is None, f"rank {rank} is outside {mesh} and yet at {mesh.coordinate}"
        result = T.redistribute(torch.empty(0, dtype=case.torch_dtype, device=device_type), source, target)
        assert result.shape == (0,), f"rank {rank} outside the mesh got {result}"
        return Outcome(result, None)
    assert mesh.coordinate is not None
    given = inputs.locals[mesh.coordinate].to(device_type)
    local = stored(given, case.storage).requires_grad_(case.differentiable)
    if not case.differentiable:
        result, grad = T.redistribute(local, source, target), None
    else:
        placements = None if case.grad is None else parsed(case.grad)
        result = T.redistribute(local, source, target, grad_placements=placements)
        arriving = inputs.local_grads[mesh.coordinate].to(device_type)
        (grad,) = torch.autograd.grad(result, local, stored(arriving, case.storage))
        grad = grad.cpu()
    assert torch.equal(local.detach(), given), "the input has changed"
    if source is not target and result.numel():
        assert result.untyped_storage().data_ptr() != local.untyped_storage().data_ptr(), (
            "the result aliases the source"
        )
    return Outcome(result.detach().cpu(), grad)


def stored(local: torch.Tensor, storage: str) -> torch.Tensor:
    """A copy of a local tensor that lies in memory as `storage` says."""
    if storage == "transposed":
        backwards = tuple(reversed(range(local.ndim)))
        return local.permute(backwards).contiguous().permute(backwards)
    if storage == "strided":
        around = local.new_zeros([2 * length + 1 for length in local.shape])
        inside = around[tuple(slice(1, None, 2) for _ in local.shape)]
        inside.copy_(local)
        return inside
    if storage == "expanded" and local.ndim and len(local) > 1 and bool((local == local[:1]).all()):
        return local[:1].clone().expand(local.shape)
    if storage == "negated":
        return torch._neg_view(-local)
    if storage == "conjugated":
        return local.conj().resolve_conj().conj()
    return local.clone()


def check_outcomes(case: Case, inputs: Inputs, outcomes: Sequence[Outcome]) -> None:
    """Checks what all ranks of the world got against the whole tensor and the whole gradient."""
    shape, source, target = case.mesh_shape, parsed(case.source), parsed(case.target)
    found = dict(zip(arithmetic.coordinates(shape), (outcomes[rank] for rank in case.ranks), strict=True))
    results = {coordinate: outcome.result for coordinate, outcome in found.items()}
    arithmetic.assert_holds(results, inputs.full, shape, target, case.target_order)
    if inputs.grad is None:
        return
    terms_of_mean = arithmetic.mean_size(shape, source)
    whole = inputs.grad if terms_of_mean == 1 else inputs.grad / terms_of_mean
    replicated = [T.Replicate() if placement.is_partial() else placement for placement in source]
    grads = {coordinate: outcome.grad for coordinate, outcome in found.items() if outcome.grad is not None}
    assert grads.keys() == found.keys(), "a rank has no gradient"
    arithmetic.assert_holds(grads, whole, shape, replicated, case.source_order)


def failure_text(case: Case) -> str:
    """How to run a failing case again."""
    return f"run it again with tests.harness.oracle.cases.check_case({case!r}, world_size={max(case.ranks) + 1})"


def check_cases(
    cases: Sequence[Case], world_size: int, costs: CostTable | None = None, device_type: str = "cpu"
) -> None:
    """Runs cases one after another on thread ranks and checks every one."""
    inputs = [inputs_of(case) for case in cases]

    def body(rank: int) -> list[Outcome]:
        found = []
        for case, given in zip(cases, inputs, strict=True):
            try:
                found.append(run_case(case, given, rank, device_type))
            except PeerError:  # the rank that failed says why
                raise
            except BaseException as error:
                raise AssertionError(f"rank {rank}: {error!r}; {failure_text(case)}") from error
        return found

    check_all(cases, inputs, run_ranks(world_size, body, costs=costs))


def check_all(cases: Sequence[Case], inputs: Sequence[Inputs], outcomes: Sequence[Sequence[Outcome]]) -> None:
    """Checks the outcomes of many cases, given per rank."""
    for case, given, *of_ranks in zip(cases, inputs, *outcomes, strict=True):
        try:
            check_outcomes(case, given, of_ranks)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{failure_text(case)}") from error


def check_case(case: Case, world_size: int) -> None:
    """Runs one case on thread ranks and checks it."""
    check_cases([case], world_size)
