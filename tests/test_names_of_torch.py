"""Names and parameters are those of torch.distributed.tensor, so that code written for it runs here."""

import inspect
from typing import Any

import pytest
import torch.distributed.tensor as reference
import torch.distributed.tensor._op_schema as op_schema_reference
import torch.distributed.tensor._random as random_reference
import torch.distributed.tensor.parallel as parallel_reference
import torch.distributed.tensor.parallel.input_reshard as input_reshard_reference
from torch.distributed import ReduceOp

import tritondt as T
import tritondt.debug
import tritondt.ops
import tritondt.parallel
import tritondt.random
from tritondt.comm.transports.threads import run_ranks

debug_reference = pytest.importorskip("torch.distributed.tensor.debug", exc_type=ImportError)  # it imports NumPy

OWN_CONSTRUCTOR = {"DTensor", "Shard", "Replicate", "Partial", "Placement"}


@pytest.mark.parametrize(
    ("owner", "ours", "names"),
    [
        (reference, T, reference.__all__),
        (reference.DTensor, T.DTensor, ("from_local", "to_local", "redistribute", "full_tensor")),
        (parallel_reference, tritondt.parallel, parallel_reference.__all__),
        (input_reshard_reference, tritondt.parallel, ["input_reshard"]),
        (random_reference, tritondt.random, ["manual_seed", "is_rng_supported_mesh"]),
        (debug_reference, tritondt.debug, debug_reference.__all__),
    ],
    ids=["tensor", "DTensor", "parallel", "input_reshard", "random", "debug"],
)
def test_public_names_and_their_parameters_are_those_of_torch(owner, ours, names):
    for name in set(names):
        expected, found = getattr(owner, name), getattr(ours, name)
        assert isinstance(found, type) is isinstance(expected, type), name
        if name in OWN_CONSTRUCTOR:
            continue
        parameters = inspect.signature(found).parameters
        for parameter in inspect.signature(expected).parameters.values():
            assert parameters[parameter.name].kind is parameter.kind, (name, parameter)
            assert parameters[parameter.name].default == parameter.default, (name, parameter)


@pytest.mark.parametrize(
    ("expected", "found"), [(reference.Shard(1), T.Shard(1)), (reference.Replicate(), T.Replicate())]
)
def test_placements_are_asked_as_those_of_torch(expected, found):
    for dim in (None, 0, 1):
        assert found.is_shard(dim) is expected.is_shard(dim)
    assert found.is_replicate() is expected.is_replicate()
    assert found.is_partial() is expected.is_partial()


def test_strategies_have_the_names_of_torch_beside_the_former_ones():
    assert tritondt.ops.OpSpec is tritondt.ops.PlacementStrategy
    expected = inspect.signature(op_schema_reference.OpSpec).parameters
    assert list(inspect.signature(tritondt.ops.OpSpec).parameters) == list(expected)
    strategies = [tritondt.ops.OpStrategy([]), tritondt.ops.OpStrategy([tritondt.ops.OpSpec(None)])]
    found = tritondt.ops.TupleStrategy(strategies)
    assert found.children is found.childs is strategies
    assert "children" in inspect.signature(op_schema_reference.TupleStrategy).parameters


def test_terms_by_torchs_reduce_op_are_terms_by_its_name():
    names: tuple[Any, ...] = ("sum", "avg", "product", "max", "min")
    unknown: list[Any] = [ReduceOp.BAND, 3]
    for name in names:
        op = getattr(ReduceOp, name.upper())
        assert T.Partial(op) == T.Partial(name)
        assert hash(T.Partial(op)) == hash(T.Partial(name))
        assert T.Partial(name).is_partial(op)
        assert not T.Partial("sum" if name != "sum" else "max").is_partial(op)
    with pytest.raises(T.LayoutError, match="Partial got reduce_op='band'; allowed are sum, avg, max, min, product"):
        T.Partial(unknown[0])
    with pytest.raises(T.LayoutError, match="Partial got reduce_op=3; allowed are sum"):
        T.Partial(unknown[1])


def test_random_numbers_of_one_mesh_follow_its_seed():
    def body(rank):
        mesh, stage = T.Mesh((2, 2)), T.Mesh((2,), ranks=(2 * (rank // 2), 2 * (rank // 2) + 1))
        tritondt.random.manual_seed(rank // 2, stage)
        found = T.rand(5, device_mesh=stage, placements=[T.Shard(0)]).full_tensor()
        other = T.Mesh((2,), ranks=(2 - 2 * (rank // 2), 3 - 2 * (rank // 2)))
        with pytest.raises(T.MeshError, match=f"manual_seed was called on rank {rank}, outside of Mesh"):
            tritondt.random.manual_seed(0, other)
        assert tritondt.random.is_rng_supported_mesh(mesh)
        return found.tolist()

    found = run_ranks(4, body)
    assert found[0] == found[1] != found[2] == found[3]
