"""Views that would have to move data: refused with the call that makes them possible."""

import re

import pytest
import torch

import tritondt as T
from tests.ops.distinct import numbers
from tests.ops.sharded import distribute
from tritondt.comm.threads import run_ranks

REFUSED = [
    (
        lambda x: x.view(2, 6),
        (12,),
        "S0",
        "aten.view.default((S0) of (12,) float64, [2, 6]) would have to move data, which a view never does: axis 0 "
        "cuts it by S0; as (2, 6) in place of (12,) these pieces are not whole indices of one dim. Ask for it first: "
        "x.redistribute(placements=[Shard(0, unit=6)]), which moves up to 48 bytes to a rank",
    ),
    (
        lambda x: x.view(2, 3, 6, 5),
        (2, 3, 30),
        "S2",
        "axis 0 cuts it by S2; as (6, 5) in place of (30,) these pieces are not whole indices of one dim. Ask for it "
        "first: x.redistribute(placements=[Shard(2, unit=5)]), which moves up to 288 bytes to a rank",
    ),
    (
        lambda x: x[3],
        (8, 4),
        "S0",
        "aten.select.int((S0) of (8, 4) float64, 0, 3) would have to move data, which a view never does: axis 0 cuts "
        "dim 0 by S0: one of its coordinates holds the index, others none. Ask for it first: "
        "x.redistribute(placements=[Shard(1)]), which moves up to 48 bytes to a rank",
    ),
    (
        lambda x: x.unbind(),
        (8,),
        "S0",
        "axis 0 cuts dim 0 by S0: one of its coordinates holds the index, others none. Ask for it first: "
        "x.redistribute(placements=[Replicate()]), which moves up to 48 bytes to a rank",
    ),
    (
        lambda x: x[3:9],
        (16,),
        "S0(repeats=4)",
        "aten.slice.Tensor((S0(repeats=4)) of (16,) float64, 0, 3, 9) would have to move data, which a view never "
        "does: axis 0 cuts dim 0 by S0(repeats=4), and the slice lies in several blocks of 4",
    ),
    (
        lambda x: x.squeeze(),
        (1,),
        "S0",
        "as () in place of (1,) these pieces are not whole indices of one dim. Ask for it first: "
        "x.redistribute(placements=[Replicate()]), which moves up to 8 bytes to a rank",
    ),
]


@pytest.mark.parametrize(("function", "shape", "text", "sentence"), REFUSED)
def test_what_would_move_data_is_refused_with_what_to_do(function, shape, text, sentence):
    def body(rank):
        x = distribute(numbers(*shape), T.Mesh((4,)), text)
        with pytest.raises(T.PropagationError, match=re.escape(sentence)) as caught:
            function(x)
        asked = re.search(r"placements=(\[.*\])\)", str(caught.value))
        assert asked is not None, "the sentence asks for placements"
        placements = eval(asked[1], {"Shard": T.Shard, "Replicate": T.Replicate})
        found, expected = function(x.redistribute(placements=placements)), function(numbers(*shape))
        pairs = zip(found, expected, strict=True) if isinstance(found, list | tuple) else [(found, expected)]
        for part, of in pairs:
            torch.testing.assert_close(part.full_tensor(), of, rtol=0, atol=0)

    run_ranks(4, body)


def test_refusals_on_two_axes_name_the_axes():
    def body(rank):
        x = distribute(numbers(12, 2), T.Mesh((2, 2)), "S0, S0")
        with pytest.raises(
            T.PropagationError, match="axes 0, 1 cut dim 0, and only a lone cut, or whole blocks of all"
        ):
            x[1:7]
        sized = distribute(numbers(4, 7), T.Mesh((2, 2)), "S0, S1(sizes=2/5)")
        with pytest.raises(
            T.PropagationError, match="sizes are kept only by the first cut of a dim; axis 0 cuts outside"
        ):
            sized.view(28)
        with pytest.raises(RuntimeError, match="shape '\\[5, 5\\]' is invalid for input of size 28"):
            sized.view(5, 5)

    run_ranks(4, body)
