"""Parts that a rank saves by torch.save and pickle, and which of them another rank may load."""

import io
import pickle
import re
from typing import Any

import pytest
import torch
from torch import nn

import tritondt as T
from tests.ops.sharded import distribute
from tritondt.comm.transports.threads import run_ranks
from tritondt.sharding.placement import parse_placements

FULL = torch.arange(35.0).reshape(7, 5)


def on_two(body):
    """Runs `body(x)` on two ranks with FULL cut along its rows, uneven as they are."""

    def run(rank):
        return body(distribute(FULL, T.Mesh((2,)), "S0"))

    return run_ranks(2, run)


def is_both(x):
    return isinstance(x, nn.Parameter) and isinstance(x, T.DTensor)


@pytest.mark.parametrize("weights_only", [True, False, None])
def test_saving_and_loading(weights_only):
    def body(rank):
        mesh = T.Mesh((2, 2), ["a", "b"])
        placements = parse_placements("S0(unit=7), S1(sizes=2/3)")
        x: Any = T.distribute_tensor(nn.Parameter(FULL), mesh, placements)
        x.note = [1, 2]
        y = distribute(FULL.bfloat16(), mesh, "S0, S0", (1, 0))
        if weights_only is None:
            found = pickle.loads(pickle.dumps({"x": x, "y": y}))
        else:
            file = io.BytesIO()
            torch.save({"x": x, "y": y}, file)
            file.seek(0)
            found = torch.load(file, weights_only=weights_only)
        for name, tensor in (("x", x), ("y", y)):
            assert type(found[name]) is T.DTensor
            assert found[name]._spec is tensor._spec
            assert found[name].to_local().equal(tensor.to_local())
        assert is_both(found["x"])
        assert found["x"].note == [1, 2]
        assert not found["y"].requires_grad

    run_ranks(4, body)


def test_what_another_rank_or_another_world_saved_is_refused():
    saved = on_two(pickle.dumps)

    def body(rank):
        assert pickle.loads(saved[rank]).shape == (7, 5)
        with pytest.raises(
            T.LocalTensorError, match=r"rank \d at coordinate .* loaded the part that coordinate .* saved; load what"
        ):
            pickle.loads(saved[1 - rank])

    run_ranks(2, body)

    def alone(rank):
        with pytest.raises(T.MeshError, match="needs rank 1, but the world has 1 ranks"):
            pickle.loads(saved[0])

    run_ranks(1, alone)
    with pytest.raises(T.WorldError, match="there is no world"):
        pickle.loads(saved[0])


def test_an_equal_part_of_another_coordinate_is_refused_and_that_of_a_replica_is_not():
    def save(rank):
        mesh = T.Mesh((2, 2))
        return pickle.dumps(distribute(torch.arange(8).reshape(4, 2), mesh, "S0, R"))

    saved = run_ranks(4, save)

    def load(rank):
        of_replica, of_other = saved[rank ^ 1], saved[rank ^ 2]
        assert pickle.loads(of_replica).to_local().equal(pickle.loads(saved[rank]).to_local())
        other = (1 - rank // 2, rank % 2)
        own = (rank // 2, rank % 2)
        text = f"coordinate {own} loaded the part that coordinate {other} of (S0, R) of (4, 2) int64 saved; load what"
        with pytest.raises(T.LocalTensorError, match=re.escape(text)):
            pickle.loads(of_other)

    run_ranks(4, load)
