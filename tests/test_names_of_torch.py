"""Names and parameters are those of torch.distributed.tensor, so that code written for it runs here."""

import inspect

import pytest
import torch.distributed.tensor as reference
import torch.distributed.tensor._op_schema as op_schema_reference
import torch.distributed.tensor.parallel as parallel_reference

import tritondt as T
import tritondt.debug
import tritondt.ops
import tritondt.parallel

debug_reference = pytest.importorskip("torch.distributed.tensor.debug", exc_type=ImportError)  # it imports NumPy

# What docs/torch_api.md says is missing, or is of another form, here.
NOT_HERE = {"loss_parallel"}
OWN_CONSTRUCTOR = {"DTensor", "Shard", "Replicate", "Partial", "Placement"}


@pytest.mark.parametrize(
    ("owner", "ours", "names"),
    [
        (reference, T, reference.__all__),
        (reference.DTensor, T.DTensor, ("from_local", "to_local", "redistribute", "full_tensor")),
        (parallel_reference, tritondt.parallel, parallel_reference.__all__),
        (debug_reference, tritondt.debug, debug_reference.__all__),
    ],
    ids=["tensor", "DTensor", "parallel", "debug"],
)
def test_public_names_and_their_parameters_are_those_of_torch(owner, ours, names):
    for name in set(names) - NOT_HERE:
        expected, found = getattr(owner, name), getattr(ours, name)
        assert isinstance(found, type) is isinstance(expected, type), name
        if name in OWN_CONSTRUCTOR:
            continue
        parameters = inspect.signature(found).parameters
        for parameter in inspect.signature(expected).parameters.values():
            assert parameters[parameter.name].kind is parameter.kind, (name, parameter)
            assert parameters[parameter.name].default == parameter.default, (name, parameter)


def test_what_is_missing_is_missing_still():
    for name in NOT_HERE:
        assert not hasattr(tritondt.parallel, name)


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


def test_a_world_is_shut_down_as_it_is_closed():
    assert T.shutdown is T.close
    assert {"close", "shutdown"} <= set(T.__all__)
