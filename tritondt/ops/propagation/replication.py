"""Plain tensors beside distributed ones: which are surely alike on every rank, and count as replicated."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from itertools import chain
from types import FrameType, NoneType
from typing import Any

import torch
from torch._ops import OpOverload
from torch.autograd import forward_ad
from torch.autograd.graph import _engine_run_backward

from tritondt.errors import MixedTensorsError
from tritondt.kernels.memory import has_memory
from tritondt.sharding.mesh import Mesh
from tritondt.sharding.placement import Replicate
from tritondt.sharding.spec import DTensorSpec, TensorMeta

_NO_BACKWARD = -1
_OWN = __name__.partition(".")[0]
# Public packages of torch through which autograd's formulas and decompositions of operators come to a dispatch. Others,
# such as torch.nn and torch.utils.checkpoint, compute for the program: a rank's own is what they recompute in backward.
_OF_AUTOGRAD = frozenset(("autograd", "fx", "functional", "overrides"))

_NOT_IN_GRAPHS = (
    "implicit_replication() does not go into a graph: enter it around the call of the compiled function, or compile "
    "without fullgraph=True"
)

_INDEXING = frozenset(("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"))

_FILLING = frozenset(("aten::index_fill", "aten::index_fill_"))

_allowed: ContextVar[bool] = ContextVar("plain tensors are replicated", default=False)


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Context manager in which plain tensors beside distributed ones count as replicated: every rank must hold the same
    values.

    Nothing is checked, and nothing is sent. Elsewhere only plain tensors without dims count as replicated; others raise
    MixedTensorsError. It applies to the calling thread, and to graphs that torch.compile traces within. Entered in a
    compiled function it ends the graph, and raises Unsupported with fullgraph=True.

    >>> import tritondt as T
    >>> from tritondt.comm.transports.threads import run_ranks
    >>> def shifted(rank):
    ...     x = T.zeros(4, device_mesh=T.Mesh((2,)), placements=[T.Shard(0)])
    ...     with T.implicit_replication():
    ...         return (x + torch.arange(4)).to_local().tolist()
    >>> run_ranks(2, shifted)
    [[0.0, 1.0], [2.0, 3.0]]
    """
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(msg=_NOT_IN_GRAPHS)
    token = _allowed.set(True)
    try:
        yield
    finally:
        _allowed.reset(token)


def count_as_replicated(counts: bool) -> bool:
    """Sets whether plain tensors count as replicated in the calling thread, and gives what held before."""
    before = _allowed.get()
    _allowed.set(counts)
    return before


def as_replicated(plain: torch.Tensor, mesh: Mesh) -> tuple[torch.Tensor, DTensorSpec]:
    """The local tensor and the spec of a tensor that is alike on every rank of `mesh`."""
    if plain.layout is not torch.strided or plain.is_nested:
        raise MixedTensorsError(
            f"an operator got a distributed tensor and a plain one of {plain.layout}{', nested' * plain.is_nested}; "
            "allowed beside distributed tensors are strided ones: give it x.to_dense(), of a nested one "
            "torch.nested.to_padded_tensor(x, 0.0)"
        )
    meta = TensorMeta(tuple(plain.shape), plain.stride(), plain.dtype)
    local = plain.detach() if mesh.coordinate is not None else plain.new_empty(0)
    return local, DTensorSpec(mesh, [Replicate()] * mesh.ndim, meta)


def with_tensors(index: Any, make: Callable[[torch.Tensor], torch.Tensor], shape: Sequence[int]) -> Any:
    """An index with `make(tensor)` in place of lists of numbers, of which torch would make plain tensors.

    A mask that is a list counts as the places that it picks, which keeps the cuts of other dims and is known in graphs.
    IndexError, on all ranks alike, for numbers beyond the tensor of `shape`: outside a mesh no kernel would look.
    """
    if type(index) is not tuple:
        found = with_tensors((index,), make, shape) if isinstance(index, list) else (index,)
        return found if len(found) > 1 else found[0]
    items = [_as_tensor(item) if isinstance(item, list) and _are_numbers(item) else item for item in index]
    lists = [place for place, item in enumerate(items) if item is not index[place]]
    if lists:
        dims = _first_dims(items, len(shape))
        masks = [place for place in lists if _is_mask(items[place], shape[dims[place] :])]
        if masks:
            places = {place: _picked(index[place], items[place].ndim) for place in masks}
            given = chain.from_iterable(places.get(place, [item]) for place, item in enumerate(index))
            return with_tensors(tuple(given), make, shape)
        looked_at = _looked_at(index, items, dims, shape)
        for place in lists:
            if dims[place] in looked_at and items[place].dtype is not torch.bool:
                _check_within(_numbers_in(index[place]), dims[place], shape)
            items[place] = make(items[place])
    return tuple(items)


def _as_tensor(numbers: list[Any]) -> torch.Tensor:
    made = torch.tensor(numbers)
    return made if made.numel() else made.long()


def _is_mask(made: torch.Tensor, lengths: Sequence[int]) -> bool:
    """Whether a list is a mask of dims that have its lengths; another mask is left to torch, which refuses it."""
    return made.dtype is torch.bool and tuple(made.shape) == tuple(lengths[: made.ndim])


def _picked(mask: list[Any], ndim: int) -> list[list[int]]:
    """For each dim of a mask, the places that it picks, in row-major order.

    >>> _picked([[True, False], [True, True]], 2)
    [[0, 1, 1], [0, 0, 1]]
    """
    if ndim == 1:
        return [[place for place, is_picked in enumerate(mask) if is_picked]]
    rows = [_picked(row, ndim - 1) for row in mask]
    first = [place for place, row in enumerate(rows) for _ in row[0]]
    return [first, *([number for row in rows for number in row[dim]] for dim in range(ndim - 1))]


def _num_dims(item: Any) -> int:
    """Number of dims of a tensor that an item of an index takes."""
    if isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8):
        return item.ndim
    return 0 if item is None or item is Ellipsis or isinstance(item, bool) else 1


def _first_dims(items: Sequence[Any], ndim: int) -> list[int]:
    """For each item of an index, the first of the dims that it takes, counted from behind after an Ellipsis."""
    takes = [_num_dims(item) for item in items]
    before = next((place for place, item in enumerate(items) if item is Ellipsis), len(items))
    return [sum(takes[:place]) if place <= before else ndim - sum(takes[place:]) for place in range(len(items))]


def _looked_at(index: Sequence[Any], items: Sequence[Any], dims: Sequence[int], shape: Sequence[int]) -> Sequence[int]:
    """The dims of which torch compares numbers: those of length 0, and all where the index leaves elements.

    `items` are those of `index`, with tensors in place of lists of numbers. How many elements other masks pick is not
    known here, and taken as some.
    """
    for item, given in zip(items, index, strict=True):
        if item is False or (isinstance(item, torch.Tensor) and not item.numel()):
            return ()
        if item is not given and item.dtype is torch.bool and not any(_numbers_in(given)):
            return ()
    left = dict(enumerate(shape))
    for item, dim in zip(items, dims, strict=True):
        if _is_plain_slice(item) and dim in left:
            left[dim] = _sliced(shape[dim], item)
        elif not isinstance(item, slice):
            for taken in range(dim, dim + _num_dims(item)):
                left.pop(taken, None)
    return [dim for dim, length in enumerate(shape) if not length or all(left.values())]


def _sliced(length: int, item: slice) -> int:
    """The length of a slice of so many elements; a length that a graph leaves open stays so."""
    if item == slice(None):
        return length
    return len(range(length)[item]) if type(length) is int else torch.empty(length, device="meta")[item].shape[0]


def _is_plain_slice(item: Any) -> bool:
    return isinstance(item, slice) and all(type(it) in (int, NoneType) for it in (item.start, item.stop, item.step))


def _numbers_in(items: list[Any]) -> list[int]:
    """All numbers of nested lists, read without a tensor: while a graph is traced a tensor has no values."""
    return [number for item in items for number in (_numbers_in(item) if isinstance(item, list) else [item])]


def _check_within(numbers: list[int], dim: int, shape: Sequence[int]) -> None:
    if not numbers:
        return
    least, most = min(numbers), max(numbers)
    if least < -shape[dim] or most >= shape[dim]:
        beyond = most if most >= shape[dim] else least
        raise IndexError(f"index {beyond} is out of bounds for dimension {dim} with size {shape[dim]}")


def _are_numbers(items: list[Any]) -> bool:
    return all(_are_numbers(item) if isinstance(item, list) else isinstance(item, int) for item in items)


def are_replicated(*, written: bool = False) -> bool:
    """Whether plain tensors of the dispatched call count as replicated; `written`: one of them is written to.

    They do within `implicit_replication()`, and where autograd itself calls: its formulas make plain tensors of shapes
    and numbers. A tensor that a formula writes to may be returned as a gradient, which would be this rank's alone.
    """
    return _allowed.get() or (not written and is_called_by_autograd())


def are_alike(op: OpOverload, args: Sequence[Any], plain: Sequence[torch.Tensor]) -> bool:
    """Whether the plain tensors of a call are alike on every rank, whoever made them.

    Meta tensors have no values: with them torch asks what a product with the zeros of forward derivatives would be
    like; other operators are given these zeros. And of masks without dims torch makes indices: it gives the tensor a
    dim of length 1 for each mask, and picks one element of that dim or none. An index of the user's into a dim of
    length 1 picks what any other index of its length would.
    """
    if all(tensor.is_meta or _is_missing_tangent(tensor) for tensor in plain):
        return True
    name = op.name().partition(".")[0]
    if name in _FILLING and len(args) > 2:  # torch 2.15 fills by such an index
        tensor, dim, index, *_ = args
        return len(plain) == 1 and index is plain[0] and _is_of_masks(index, tensor.shape[dim])
    if name not in _INDEXING or len(args) < 2:
        return False
    tensor, indices, *_ = args
    dim, num_of_masks = 0, 0
    for index in indices:
        if any(index is one for one in plain):
            num_of_masks += _is_of_masks(index, tensor.shape[dim])
        dim += index.ndim if index is not None and index.dtype in (torch.bool, torch.uint8) else 1
    return num_of_masks == len(plain)


def _is_missing_tangent(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor is what forward derivatives have in place of a constant's tangent: one 0, expanded."""
    if forward_ad._current_level < 0 or any(tensor.stride()) or not has_memory(tensor):
        return False
    return tensor.untyped_storage().nbytes() == tensor.itemsize and not tensor.as_strided((), ()).item()


def _is_of_masks(index: torch.Tensor, length: int) -> bool:
    return index.dtype is torch.int64 and index.ndim == 1 and index.numel() <= 1 == length


def is_called_by_autograd() -> bool:
    """Whether no code of the program's stands between autograd's engine and the dispatch of an operator.

    Dispatch modes may: they are handed what the engine asks for.
    """
    if torch._C._current_graph_task_id() == _NO_BACKWARD:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _engine_run_backward.__code__:
        is_ours = frame.f_code.co_name == "__torch_dispatch__" or _is_of_autograd(frame.f_globals.get("__name__", ""))
        if not is_ours:
            return False
        frame = frame.f_back
    # Engine threads of devices have no Python below.
    return True


@lru_cache(maxsize=1024)  # one entry for each module that is met in backward
def _is_of_autograd(module: str) -> bool:
    """Whether functions of a module are autograd's own or this library's.

    >>> [_is_of_autograd(name) for name in ("torch._refs", "torch.autograd.function", "torch.nn.modules.linear")]
    [True, True, False]
    """
    package, *inside = module.split(".")
    if package != "torch" or not inside:
        return package in (_OWN, "torch")
    first = inside[1] if inside[0] == "utils" and len(inside) > 1 else inside[0]
    return first.startswith("_") or first in _OF_AUTOGRAD
