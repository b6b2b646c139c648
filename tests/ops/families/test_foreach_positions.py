"""Lists of which a position overlaps what it writes, and tensors with one number for each position."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tritondt as T
from tests.ops.distinct import numbers
from tests.ops.sharded import compare, distribute
from tritondt.comm.transports.threads import run_ranks

OVERLAPPING: dict[str, Callable[[Any], Any]] = {
    "rows": lambda x: torch._foreach_add_([x[2:], x[:2], x[:2]], [x[2:], x[:2], x[1:3]]),
    "columns": lambda x: torch._foreach_mul_([x[:, :2], x[:, 2:]], [x[:, 1:3], x[:, 2:]]),
    "two lists": lambda x: torch._foreach_addcmul_([x[:2], x[2:]], [x[:2], x[2:]], [x[1:3], x[2:]], [2.0, 3.0]),
    "copies": lambda x: torch._foreach_copy_([x[:2], x[2:]], [x[1:3], x[2:] + 1]),
}


def _written(name: str) -> torch.Tensor:
    """What the lists come to where each position reads what was there before it is written to."""
    x = numbers(4, 4)
    if name == "rows":
        x[2:] *= 2
        x[:2] *= 2
        x[:2] += x[1:3].clone()
    elif name == "columns":
        x[:, :2] *= x[:, 1:3].clone()
        x[:, 2:] *= x[:, 2:].clone()
    elif name == "two lists":
        x[:2] += 2 * x[:2] * x[1:3]
        x[2:] += 3 * x[2:] ** 2
    else:
        x[:2] = x[1:3].clone()
        x[2:] += 1
    return x


@pytest.mark.parametrize("text", ["S0(sizes=3/1)", "S1(sizes=1/3)", "S0", "S1", "R"])
@pytest.mark.parametrize("name", OVERLAPPING)
def test_lists_of_which_a_position_overlaps_what_it_writes_are_written_alike_on_all_ranks(name, text):
    # On one device torch refuses some of these, and reads of others in the order of the kernel.
    def body(rank):
        x = distribute(numbers(4, 4), T.Mesh((2,)), text)
        version = x._version
        OVERLAPPING[name](x)
        assert x._version > version
        compare(x, _written(name))

    run_ranks(2, body)


@pytest.mark.parametrize("placements", ["R, R, R", "S0, S0, S0", "S0, S1, R", "P, P, R", "S1, P, S0"])
@pytest.mark.parametrize("name", ["addcmul", "addcdiv"])
def test_a_tensor_of_numbers_beside_lists_of_other_layouts(name, placements):
    scalars = torch.tensor([2.0, 3.0], dtype=torch.float64)

    def called(op: str, given: Any, factors: Any) -> Any:
        lists = [[x, x + 1] for x in given]
        made = getattr(torch, op)(*lists, factors)
        return lists[0] if made is None else made

    given = [numbers(4, 3) + 2 ** (8 * place) for place in range(3)]

    def body(rank):
        mesh = T.Mesh((2,))
        layouts = placements.split(", ")
        for op in (f"_foreach_{name}", f"_foreach_{name}_"):
            own = [x.clone() for x in given]
            spread = [distribute(x, mesh, text) for x, text in zip(own, layouts, strict=True)]
            found, expected = called(op, spread, distribute(scalars, mesh, "R")), called(op, own, scalars)
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one.full_tensor(), other, rtol=1e-14, atol=0)

    run_ranks(2, body)
