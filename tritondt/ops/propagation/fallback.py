"""Operators without a strategy: decomposed, then refused or run on gathered tensors."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, partial
from importlib import import_module
from typing import Any, Literal

import torch
from torch._ops import OpOverload

from tritondt import identity
from tritondt.errors import PropagationError
from tritondt.ops.propagation.decompositions import DECOMPOSITIONS, written_by_functional
from tritondt.ops.propagation.placeholders import placeholder_specs
from tritondt.ops.propagation.replication import is_called_by_autograd
from tritondt.ops.propagation.schema import OpSchema, OutputSharding, OutputSpecs
from tritondt.ops.propagation.tensor_meta import SHAPES_UNKNOWN, check_gives_strided, propagate_tensor_meta
from tritondt.sharding.placement import Replicate, placements_code
from tritondt.sharding.spec import DTensorSpec, TensorMeta, check_not_quantised

Mode = Literal["raise", "replicate"]
MODES: tuple[Mode, ...] = ("raise", "replicate")

# Those of torch._refs go by way of operators (prims) that have no strategy.
_DECOMPOSITIONS = ("torch._decomp.decompositions", "torch._ops.aten")

# Operators that autograd and programs call with sharded arguments too, and the layouts of what they give.
_LAYOUTS = {
    torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors.default: torch.sparse_coo,
    torch.ops.aten._to_sparse.default: torch.sparse_coo,
    torch.ops.aten._to_sparse.sparse_dim: torch.sparse_coo,
    torch.ops.aten._to_sparse_csr.default: torch.sparse_csr,
    torch.ops.aten._to_sparse_csc.default: torch.sparse_csc,
    torch.ops.aten._to_sparse_bsr.default: torch.sparse_bsr,
    torch.ops.aten._to_sparse_bsc.default: torch.sparse_bsc,
    torch.ops.aten.to_mkldnn.default: torch._mkldnn,  # type: ignore[attr-defined]
}

_is_admitted: ContextVar[bool] = ContextVar("what is refused may run", default=False)

_logger = logging.getLogger("tritondt")


class _OfProcess:
    """The mode that holds for a process; None for the default."""

    mode: Mode | None = None


class _OfRank(threading.local):
    """The mode of a rank that is a thread; None where the rank has set none."""

    mode: Mode | None = None


class Fallback:
    """The fallback mode, and the decisions that follow from it; `on_change` is called when the mode changes."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._of_process, self._of_rank = _OfProcess(), _OfRank()
        self._on_change = on_change
        self._warned: set[OpOverload] = set()

    @property
    def mode(self) -> Mode:
        """The mode that holds for the calling rank."""
        return self._of_rank.mode or self._of_process.mode or "raise"

    def set(self, mode: Mode) -> "RestoreMode":
        """Sets the mode, "raise" or "replicate", for the process; used with `with`, until the end of the block.

        A rank that is a thread sets only its own mode.

        In mode "raise", the default, an operator without a strategy raises PropagationError; in mode "replicate" its
        arguments are gathered first, with one warning per operator. Not collective, but all ranks must set the mode
        alike. PropagationError for another mode.

        >>> import tritondt as T
        >>> with T.ops.set_fallback("replicate"):
        ...     T.ops.propagator.fallback.mode
        'replicate'
        >>> T.ops.propagator.fallback.mode
        'raise'
        """
        if mode not in MODES:
            raise PropagationError(f"the fallback {mode!r} is not known; allowed are {' and '.join(map(repr, MODES))}")
        held = self._of_rank if identity.is_assumed() else self._of_process
        before = held.mode
        self._put(held, mode)
        return RestoreMode(partial(self._put, held, before))

    def _put(self, held: _OfProcess | _OfRank, mode: Mode | None) -> None:
        held.mode = mode
        self._on_change()

    def decide(self, schema: OpSchema) -> OutputSharding:
        """The decision to gather everything where the mode says so; PropagationError, with a way out, where not.

        A call on tensors that are whole on every rank needs no gathering, and runs. An operator that gives quantised or
        sparse tensors is refused, however its arguments are laid out.
        """
        _check_results(schema)
        if is_replicated(schema):
            return replicate_all(schema)
        # What changes its own shape would leave the memory that others know.
        if self.mode == "raise" or torch.Tag.inplace_view in schema.op.tags:
            raise PropagationError(unknown_text(schema))
        self._warn_once(schema.op, "%s has no strategy and runs on gathered tensors, as the fallback says")
        return replicate_all(schema)

    def admit(self, op: OpOverload, refusal: str) -> None:
        """Raises PropagationError with `refusal`, unless the mode is to replicate.

        A call by autograd itself passes: nobody could ask there for what is missing.
        """
        if _is_admitted.get() or is_called_by_autograd():
            return
        if self.mode == "raise":
            raise PropagationError(refusal)
        self._warn_once(op, "%s moves its argument and gives a copy, as the fallback says")

    def _warn_once(self, op: OpOverload, text: str) -> None:
        if op not in self._warned:
            self._warned.add(op)
            _logger.warning(text, op)


@contextmanager
def admitted() -> Iterator[None]:
    """Admits refused calls within: they were admitted before."""
    token = _is_admitted.set(True)
    try:
        yield
    finally:
        _is_admitted.reset(token)


class RestoreMode:
    """Restores the former mode at the end of a `with` block; without one nothing happens."""

    def __init__(self, restore: Callable[[], None]) -> None:
        self._restore = restore

    def __enter__(self) -> None:
        """None: the mode is set already."""

    def __exit__(self, *_: object) -> None:
        self._restore()


def _check_results(schema: OpSchema) -> None:
    """Refuses calls whose results have a quantised dtype, which torch's fakes take for float32, or no strides."""
    for argument in (*schema.args_schema, *schema.kwargs_schema.values()):
        if isinstance(argument, torch.dtype):
            check_not_quantised(f"{schema.op} of a distributed tensor", argument)
    layout = _LAYOUTS.get(schema.op)
    if layout is not None:
        check_gives_strided(schema.op, layout)


def replicate_all(schema: OpSchema) -> OutputSharding:
    """The decision to run on replicated tensors; views whose argument moves become copied views."""
    replicated = [Replicate()] * schema.mesh.ndim
    inputs = tuple(spec.with_placements(replicated) for spec in schema.args_spec)
    moved = None if inputs == schema.args_spec else inputs
    copies_view = schema.is_view and moved is not None
    try:
        metas = propagate_tensor_meta(schema)
    except SHAPES_UNKNOWN:
        if schema.mesh.coordinate is None:
            return OutputSharding(placeholder_specs(schema), moved, copies_view=copies_view)
        return OutputSharding(None, moved, data_dependent=True, copies_view=copies_view)
    outputs: OutputSpecs = None
    if isinstance(metas, TensorMeta):
        outputs = DTensorSpec(schema.mesh, replicated, metas)
    elif metas is not None:
        outputs = [None if meta is None else DTensorSpec(schema.mesh, replicated, meta) for meta in metas]
    return OutputSharding(outputs, moved, copies_view=copies_view)


def is_replicated(schema: OpSchema) -> bool:
    """Whether every rank holds all of every argument, so that each can run the call for itself."""
    whole = all(isinstance(placement, Replicate) for spec in schema.args_spec for placement in spec.placements)
    return whole and torch.Tag.nondeterministic_seeded not in schema.op.tags


@lru_cache(maxsize=1024)
def decomposition_of(op: OpOverload) -> Callable[..., Any] | None:
    """The decomposition of `op` into other operators; None where there is none, and for views.

    Our own come first, then torch's. An operator that writes to an argument runs as the functional one.
    """
    own = DECOMPOSITIONS.get(op)
    if own is not None:
        return own
    if op.namespace == "prims":  # derivatives of higher order call them; each names torch's function of the same kind
        return getattr(op, "impl_aten", None)
    if any(argument.alias_info is not None for argument in op._schema.arguments):
        return written_by_functional(op)
    # Loading them takes a second, which programs whose operators all have strategies save.
    found = import_module("torch._decomp").decomposition_table.get(op)
    return found if getattr(found, "__module__", None) in _DECOMPOSITIONS else None


def unknown_text(schema: OpSchema) -> str:
    """The reason why a call cannot run, and the ways to make it run."""
    specs = ", ".join(map(str, schema.args_spec))
    replicated = placements_code([Replicate()] * schema.mesh.ndim)
    return (
        f"{schema.op} has no strategy for distributed tensors; it was called with {specs}. Register one with "
        f"tritondt.ops.register_op_strategy({schema.op}, ...), or gather its arguments, each by x.redistribute("
        f"placements={replicated}), or let that happen for every such operator: tritondt.ops.set_fallback('replicate')"
    )
