"""Hooks of distribute_module: what they take and give, and those of two arguments."""

from typing import Any

import pytest
import torch
from torch import nn

import tritondt as T
from tritondt.comm.transports.threads import run_ranks


def test_hooks_take_plain_tensors_in_and_give_plain_ones_out():
    weight, data = torch.arange(12.0).reshape(3, 4), torch.arange(8.0).reshape(2, 4)

    def body(rank):
        mesh, model = T.Mesh((2,)), nn.Linear(4, 3, bias=False)
        with torch.no_grad():
            model.weight.copy_(weight)

        def shard(name, module, device_mesh):
            module.weight = T.distribute_tensor(module.weight, device_mesh, [T.Shard(0)])

        def take(module, inputs, device_mesh):
            assert module is model
            return tuple(T.distribute_tensor(tensor, device_mesh) for tensor in inputs)

        def give(module, outputs, device_mesh):
            assert outputs.placements == (T.Shard(1),)
            return outputs.full_tensor()

        T.distribute_module(model, mesh, shard, input_fn=take, output_fn=give)
        found = model(data)
        torch.testing.assert_close(found, data @ weight.t())
        for name in ("input_fn", "output_fn"):
            hook: dict[str, Any] = {name: lambda only: None}
            with pytest.raises(
                T.TritondtError, match=rf"{name} takes \(module, \w+, device_mesh\), got a function of 1"
            ):
                T.distribute_module(nn.Linear(1, 1), mesh, None, **hook)

    run_ranks(2, body)


def test_hooks_of_two_arguments_are_deprecated_and_run():
    def body(rank):
        mesh, seen = T.Mesh((1,)), []

        def take(inputs, device_mesh):
            seen.append(device_mesh)
            return tuple(T.distribute_tensor(tensor, device_mesh) for tensor in inputs)

        with pytest.warns(FutureWarning) as warned:
            model = T.distribute_module(nn.Linear(4, 3), mesh, None, take, lambda outputs, found: outputs.full_tensor())
        assert sorted(str(warning.message).split(" is")[0] for warning in warned) == [
            "input_fn of two arguments (inputs, device_mesh)",
            "output_fn of two arguments (outputs, device_mesh)",
        ]
        assert type(model(torch.ones(2, 4))) is torch.Tensor
        assert seen == [mesh]
        plain = nn.Linear(1, 1)
        with pytest.raises(T.TritondtError, match=r"output_fn takes \(module, outputs, device_mesh\)"):
            T.distribute_module(plain, mesh, output_fn=lambda only: None)
        assert type(plain.weight) is nn.Parameter  # refused before anything has changed

    # One rank: what catches warnings is shared by threads.
    run_ranks(1, body)
