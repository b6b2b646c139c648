"""Dtypes that an operator has no kernel for: refused on all ranks, outside the mesh and without elements too."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tritondt as T
from tritondt.comm.transports.threads import run_ranks
from tritondt.ops.propagation import kernel_dtypes

# Elementwise operators, operators of which the kernel tells, and one that is chosen by more than the dtype.
CALLS = {
    "abs": (torch.bool, lambda x: x.abs()),
    "bitwise_and": (torch.float32, lambda x: x & x),
    "lt": (torch.complex64, lambda x: x < x),
    "gelu": (torch.int64, F.gelu),
    "sign": (torch.complex64, lambda x: x.sign()),
    "mm": (torch.bool, lambda x: x @ x),
    "softmax": (torch.int64, lambda x: x.softmax(-1)),
    "median": (torch.bool, lambda x: x.median(0)),
    "var": (torch.int64, lambda x: x.var()),
    "eigvalsh": (torch.bfloat16, torch.linalg.eigvalsh),
    "avg_pool2d": (torch.complex64, lambda x: F.avg_pool2d(x[None], 1)),
    "mul_": (torch.int64, lambda x: x.mul_(x * 0.5)),
    "scatter_reduce": (torch.complex64, lambda x: x.scatter_reduce(0, (x * 0).real.long(), x, "amax")),
    "neg_out": (torch.int8, lambda x: torch.neg(x, out=x.long())),
    "neg_resized": (torch.int8, lambda x: torch.neg(x, out=x[:0].long())),
    "bitwise_not_out": (torch.int8, lambda x: torch.bitwise_not(x, out=x.short())),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_dtype_without_a_kernel_raises_on_ranks_outside_the_mesh_too(name):
    dtype, function = CALLS[name]
    whole = torch.ones(1, 1).to(dtype)
    with pytest.raises(RuntimeError) as one_device:
        function(whole)

    def body(rank):
        # One rank has no elements, another is outside.
        for ranks, text in (((0,), "R"), ((0, 1), "S0")):
            x = T.distribute_tensor(whole, T.Mesh((len(ranks),), ranks=ranks), T.parse_placements(text))
            with pytest.raises(type(one_device.value), match=r"implement|support|cast|dtype"):
                function(x)

    run_ranks(3, body)


def test_no_rank_raises_once_another_waits_for_its_message():
    """An out of another dtype that has to move first: the rank without elements knew, the other one was waiting."""

    def body(rank):
        x = T.distribute_tensor(torch.ones(1, 1), T.Mesh((2,)), [T.Shard(1)])
        out: Any = x.double().sum(1, keepdim=True)  # a term on each rank
        assert out.placements == (T.Partial(),)
        with pytest.raises(RuntimeError, match="Found dtype Double but expected Float"):
            torch.neg(x, out=out)

    run_ranks(2, body)


def test_what_kernels_take_is_tried_once_and_gives_what_one_device_gives():
    x = torch.arange(9).view(3, 3)

    def body(rank):
        given: Any = T.distribute_tensor(x, T.Mesh((2,)), [T.Shard(0)])
        for place in (1, 2, 3):
            found = given.scatter_reduce(0, given % 3, given * place, "amax").full_tensor()
            expected = x.scatter_reduce(0, x % 3, x * place, "amax")
            if rank < 2:
                torch.testing.assert_close(found, expected, rtol=0, atol=0)

    keys: Any = kernel_dtypes._told
    keys.clear()
    run_ranks(3, body)
    told = [text for (op, *_), text in keys.items() if op is torch.ops.aten.scatter_reduce.two]
    assert told == [None]


def test_nothing_is_tried_on_many_elements():
    x = torch.ones(1, 80, 80, dtype=torch.complex64)

    def body(rank):
        given: Any = T.distribute_tensor(x, T.Mesh((1,), ranks=(0,)), [T.Replicate()])
        if rank == 0:
            with pytest.raises(RuntimeError):
                F.avg_pool2d(given, 1)

    keys: Any = kernel_dtypes._told
    keys.clear()
    run_ranks(2, body)
    assert not any(op is torch.ops.aten.avg_pool2d.default for op, *_ in keys)


@pytest.mark.parametrize("solve", [torch.linalg.ldl_solve, torch.linalg.lu_solve])
def test_pivots_are_rows_of_the_matrix(monkeypatch, solve):
    """LAPACK swaps rows by them without a look: a pivot of 0 wrote outside the matrix."""
    given = []
    monkeypatch.setattr(kernel_dtypes, "_told", {})
    monkeypatch.setattr(kernel_dtypes, "_run", lambda schema, make: given.append(make(schema.args_spec[1])))

    def run(rank):
        mesh = T.Mesh((1,), ranks=(0,))
        matrix, pivots = torch.eye(3), torch.arange(1, 4, dtype=torch.int32)
        parts = [T.distribute_tensor(each, mesh, [T.Replicate()]) for each in (matrix, pivots, matrix)]
        assert solve(*parts).shape == (3, 3)

    run_ranks(2, run)
    assert {(pivots.dtype, *pivots.tolist()) for pivots in given} == {(torch.int32, 1, 1, 1)}
