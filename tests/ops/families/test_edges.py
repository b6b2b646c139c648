"""Operators at their edges, as on one device: expanded, transposed and empty arguments, and what torch refuses."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tritondt as T
from tests.ops.distinct import numbers
from tests.ops.sharded import compare, distribute
from tritondt.comm.transports.threads import run_ranks

# Calls of a distributed tensor and their counterparts on one device; torch's kernel of the median reads behind a row
# whose elements share memory, so that there it gets elements of its own.
MEDIANS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "rows that share memory": (lambda x, own: own(x[:1].expand(4, 3)).median(0), "R, S1"),
    "columns that share memory": (lambda x, own: own(x[:, 1:2].expand(4, 5)).nanmedian(1), "R, S0"),
    "a grid": (lambda x, own: own(torch.meshgrid(x[:, 0], x[2, :2], indexing="ij")[1]).median(0), "R, S0, S1"),
}
STRIDES: dict[str, Callable[[Any], Any]] = {
    "isin": lambda x: torch.isin(x.t(), x[0]),
    "masked_fill": lambda x: x.t().masked_fill(x.t() > 3, 1.0),
    "number to a power": lambda x: 2 ** x.t(),
    "one_hot": lambda x: F.one_hot(x.t().long(), 12),
    "batch norm": lambda x: F.batch_norm(x.t(), None, None, training=True),
    "batch norm of images": lambda x: F.batch_norm(x.view(2, 2, 3).transpose(0, 1), None, None, training=True),
}
# Ways to resample images of one to three dims.
MODES = ((1, "nearest"), (1, "linear"), (2, "nearest-exact"), (2, "bicubic"), (3, "nearest-exact"))


def _resampled(num_dims: int, mode: str) -> Callable[[Any], Any]:
    return lambda x: F.interpolate(x[:0].view(0, 3, *(1,) * num_dims), scale_factor=2, mode=mode)


def _along_rows(name: str) -> Callable[[Any], Any]:
    return lambda x: getattr(x[:0], name)(0)


EMPTY: dict[str, Callable[[Any], Any]] = {
    "norm of no rows": lambda x: x[:0].norm(float("inf"), dim=-1),
    "least norm of no rows": lambda x: torch.linalg.vector_norm(x[:0], -1, -1, keepdim=True),
    "joined with nothing of another kind": lambda x: torch.cat([x[0, :0], x]),
    "joined with nothing that is cut otherwise": lambda x: torch.cat([x[:1, :1], x[:1, :1].t()[:0], x.t()[:, :1][:1]]),
    **{f"{num_dims} dims resampled, {mode}": _resampled(num_dims, mode) for num_dims, mode in MODES},
}
# Along a dim without elements.
NO_ROWS: dict[str, Callable[[Any], Any]] = {
    **{name: _along_rows(name) for name in ("max", "min", "median", "nanmedian", "mode")},
    "argmax": lambda x: x[:, :0].argmax(1),
    "argmin of all": lambda x: x[:0].argmin(),
    "kthvalue": lambda x: x[:0].kthvalue(1, 0),
    "channels": lambda x: F.interpolate(x[:, None, :0].view(4, 0, 2), scale_factor=2),
    "pixels": lambda x: F.interpolate(x[:, :0].view(1, 4, 0), size=3),
}
REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "block_diag of 3 dims": (
        lambda x: torch.block_diag(x[None], x),
        "at most 2 dims; that at 0 has 3|2 or fewer dimensions",
    ),
    "min of nothing": (lambda x: x[:0].min(), r"min.default of no elements has no value|min\(\): .* numel\(\) == 0"),
    "max of nothing": (lambda x: x[:, :0].max(), r"max.default of no elements has no value|max\(\): .* numel\(\) == 0"),
    "mode of nothing": (lambda x: x[:1, :0].mode(1), "dim 1 to have non-zero size"),
    "embedding in 3 dims": (lambda x: F.embedding(x[0].long(), x[None]), "'weight' must be 2-D"),
}


def test_medians_of_elements_that_share_memory():
    def body(rank):
        mesh = T.Mesh((2,))
        for function, texts in MEDIANS.values():
            expected = tuple(function(numbers(4, 3), torch.Tensor.contiguous))
            for text in texts.split(", "):
                compare(tuple(function(distribute(numbers(4, 3), mesh, text), lambda x: x)), expected, exact=True)

    run_ranks(2, body)


def test_strides_are_those_of_kernels():
    def body(rank):
        mesh = T.Mesh((2,))
        for name, function in STRIDES.items():
            expected = function(numbers(4, 3))
            for text in ("R", "S0", "S1"):
                found = function(distribute(numbers(4, 3), mesh, text))
                compare(found, expected)
                assert found.stride() == expected.stride(), (name, text)

    run_ranks(2, body)


def test_results_of_nothing():
    def body(rank):
        mesh = T.Mesh((2,))
        for name, function in EMPTY.items():
            for text in ("R", "S0", "S1", "P"):
                compare(function(distribute(numbers(4, 3), mesh, text)), function(numbers(4, 3)), what=f"{name} {text}")

    run_ranks(2, body)


def test_what_torch_refuses_is_refused_on_all_ranks():
    def body(rank):
        mesh, told = T.Mesh((2,)), []
        for name, (function, _) in REFUSED.items():
            for text in ("R", "S0", "S1"):
                try:
                    function(distribute(numbers(4, 3), mesh, text))
                except (RuntimeError, IndexError) as error:
                    told.append((name, str(error)))
                else:
                    told.append((name, "nothing raised"))
        return told

    first, second = run_ranks(2, body)
    assert first == second
    for name, text in first:
        assert re.search(REFUSED[name][1], text), (name, text)


@pytest.mark.parametrize("name", NO_ROWS)
def test_what_has_no_value_is_refused_outside_the_mesh_too(name):
    with pytest.raises((IndexError, RuntimeError)) as on_one_device:
        NO_ROWS[name](numbers(4, 3))

    def body(rank):
        x = T.distribute_tensor(numbers(4, 3), T.Mesh((1,), ranks=(0,)), [T.Replicate()], src_data_rank=None)
        with pytest.raises(on_one_device.type) as told:
            NO_ROWS[name](x)
        return str(told.value)

    first, second = run_ranks(2, body)
    assert first == second
    assert re.search("to have non-zero size|selected number k|the batch alone may be empty", first), first
