"""The optimizers of torch.optim on distributed parameters do what they do on one device."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import tritondt as T
from tests.ops.families.test_foreach import PARAMETERS, lists_of, randoms, spread
from tests.ops.sharded import Case, check, compare, distribute
from tritondt.comm.transports.threads import run_ranks

_FOREACH: dict[str, Any] = {
    "Adadelta": {}, "Adagrad": {}, "Adam": {"amsgrad": True, "weight_decay": 0.1}, "AdamW": {}, "Adamax": {},
    "ASGD": {}, "NAdam": {"decoupled_weight_decay": True}, "RAdam": {}, "RMSprop": {"centered": True, "momentum": 0.9},
    "Rprop": {}, "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
}  # fmt: skip
_FUSED: dict[str, Any] = {
    "Adam": {"amsgrad": True}, "AdamW": {"maximize": True}, "SGD": {"momentum": 0.9}, "Adagrad": {},
}  # fmt: skip
OPTIMIZERS = [
    *((name, {"foreach": True, **options}) for name, options in _FOREACH.items()),
    *((name, {"foreach": False, **options}) for name, options in _FOREACH.items()),
    *((name, {"fused": True, **options}) for name, options in _FUSED.items()),
    ("AdamW", {"fused": True, "lr": torch.tensor(0.01)}),
    ("SGD", {"fused": True, "lr": torch.tensor(0.01)}),
    ("SGD", {"foreach": True}),
    ("SGD", {"fused": True}),
]


def trained(
    name: str, options: dict[str, Any], values: Sequence[Any], grads: Callable[[int], Sequence[Any]], steps: int = 4
) -> tuple[list[Any], Any]:
    """Parameters after some steps, and the optimizer; the second step lacks a gradient."""
    parameters: list[Any] = [nn.Parameter(value.clone()) for value in values]
    if name == "Rprop":  # its signs of a tensor of no dims are written through a plain index that torch makes
        parameters.pop()
    optimizer = getattr(torch.optim, name)(parameters, **{"lr": 0.05, **options})
    for step in range(steps):
        for place, (parameter, grad) in enumerate(zip(parameters, grads(step), strict=False)):
            parameter.grad = None if (step, place) == (1, 2) else grad
        optimizer.step()
    return parameters, optimizer


def plain_grads(step):
    return lists_of(100 + step, 1)[0]


@pytest.mark.parametrize(("name", "options"), OPTIMIZERS, ids=lambda value: str(value).replace(" ", ""))
def test_optimizers_do_what_they_do_on_one_device(name, options):
    (values,) = lists_of(50, 1)
    plain, plain_optimizer = trained(name, options, values, plain_grads)

    def body(rank):
        mine, optimizer = trained(name, options, spread(values), lambda step: spread(plain_grads(step)))
        for place, (parameter, of) in enumerate(zip(mine, plain, strict=True)):
            assert parameter._spec.placements == T.parse_placements(PARAMETERS[place][1])
            # The fused kernels take other instructions for the last elements of a tensor, which the cut moves.
            compare(parameter, of, exact="fused" not in options, what=f"{name} parameter {place}")
            for key, state in plain_optimizer.state[of].items():
                found = optimizer.state[parameter][key]
                if isinstance(found, T.DTensor):
                    compare(found, state, exact="fused" not in options, what=f"{name} {key} {place}")
                else:
                    torch.testing.assert_close(found, state, rtol=0, atol=0)

    run_ranks(4, body)


PENDING = ["P, R", "S0, R", "S0, P", "P, P(avg)", "P, R", "P, P", "P, P", "P, P"]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("AdamW", {"foreach": True}), ("AdamW", {"foreach": False}), ("AdamW", {"fused": True}),
        ("SGD", {"foreach": True, "momentum": 0.9}), ("Adagrad", {"fused": True}),
    ],
    ids=lambda value: str(value).replace(" ", ""),
)  # fmt: skip
def test_gradients_laid_out_otherwise_come_to_the_parameters(name, options):
    (values,) = lists_of(50, 1)
    plain, _ = trained(name, options, values, plain_grads)

    def body(rank):
        mine, _ = trained(name, options, spread(values), lambda step: spread(plain_grads(step), PENDING))
        for parameter, of in zip(mine, plain, strict=True):
            compare(parameter, of)

    run_ranks(4, body)


def test_fused_refuses_state_that_lies_elsewhere():
    def body(rank):
        mesh = T.Mesh((2,))
        fused_sgd: Any = torch._fused_sgd_
        x, state = (distribute(torch.ones(4, 4), mesh, text) for text in ("S0", "S1"))
        pending = distribute(torch.ones(4, 4), mesh, "P")
        numbers = {"weight_decay": 0.0, "momentum": 0.9, "lr": 0.1, "dampening": 0.0}
        flags = {"nesterov": False, "maximize": False, "is_first_step": False}
        with pytest.raises(
            T.PropagationError, match=r"writes to momentum_buffer_list laid out as \(S1\).*parameters as"
        ):
            fused_sgd([x], [x.clone()], [state], **numbers, **flags)
        with pytest.raises(
            T.PropagationError, match=r"got a parameter \(P\(sum\)\).*redistribute it to Replicate or Shard"
        ):
            fused_sgd([pending], [x.clone()], [x.clone()], **numbers, **flags)
        with pytest.raises(T.PropagationError, match=r"with grad_scale writes to gradients laid out as \(P\(sum\)\)"):
            fused_sgd([x], [pending], [x.clone()], grad_scale=torch.tensor(1.0), **numbers, **flags)

    run_ranks(2, body)


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}], ids=["fused", "foreach"])
def test_parts_whose_memory_is_in_another_order(options):
    """Transposed parameters get row-major gradients where these had to move."""
    value, grad = randoms(8, [(6, 4), (6, 4)])
    expected = nn.Parameter(value.clone())
    expected.grad = grad
    torch.optim.AdamW([expected], lr=0.1, **options).step()

    def body(rank):
        mesh = T.Mesh((2,))
        part = distribute(value, mesh, "S0").to_local().t().contiguous().t()
        mine: Any = nn.Parameter(T.DTensor.from_local(part, mesh, [T.Shard(0)]))
        assert mine.stride() == (1, 6)
        mine.grad = distribute(grad, mesh, "P")
        torch.optim.AdamW([mine], lr=0.1, **options).step()
        compare(mine, expected)

    run_ranks(2, body)


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}], ids=str)
def test_state_goes_through_a_state_dict(options):
    (values,) = lists_of(50, 1)

    def body(rank):
        def grads(step):
            return spread(plain_grads(step))

        whole, _ = trained("AdamW", options, spread(values), grads)
        half, before = trained("AdamW", options, spread(values), grads, steps=2)
        after = torch.optim.AdamW(half, lr=0.3, **options)
        after.load_state_dict(copy.deepcopy(before.state_dict()))
        for step in (2, 3):
            for parameter, grad in zip(half, grads(step), strict=True):
                parameter.grad = grad
            after.step()
        for parameter, of in zip(half, whole, strict=True):
            torch.testing.assert_close(parameter.to_local(), of.to_local(), rtol=0, atol=0)
            state = after.state[parameter]
            assert isinstance(state["exp_avg"], T.DTensor)
            assert state["exp_avg"]._spec is parameter._spec

    run_ranks(4, body)


def test_a_number_where_a_mask_says_needs_no_whole_tensor():
    """Rprop writes its signs so."""
    (x,) = randoms(9, [(7, 5)])

    def filled(x):
        y = x.clone()
        y[y > 0] = 1.5
        return y

    check(filled, Case((3,), (x,), ("S0",)), exact=True, expect="S0")
