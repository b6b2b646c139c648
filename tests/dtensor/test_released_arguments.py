"""Arguments of calls die with their last reference: no dispatch leaves a cycle that holds them until a collection."""

import gc
import logging
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tritondt as T
from tests.ops.sharded import distribute
from tritondt.comm.transports.threads import run_ranks
from tritondt.ops import set_fallback


@pytest.fixture(autouse=True)
def _without_collections():
    gc.collect()
    gc.disable()
    # pytest keeps what is logged, and on torch 2.15 FakeTensorMode logs tracebacks, whose frames hold the arguments.
    logging.disable()
    yield
    logging.disable(logging.NOTSET)
    gc.enable()


def _given_back(x: Any) -> None:
    y = x * 3
    (y.sin() * x).sum().backward()


def _redistributed(x: Any) -> None:
    x.redistribute(placements=[T.Shard(1)]).sum().backward()


def _prefetched(x: Any) -> None:
    T.prefetch(x, [T.Replicate()])
    x.redistribute(placements=[T.Replicate()]).wait()


def _written(x: Any) -> None:
    y = x.detach().clone()
    y[1] = 5.0
    y.add_(1).t_()


def _copied_view(x: Any) -> None:
    with set_fallback("replicate"):
        view = x.detach().view(-1)
        view.add(1)


def _plain_beside(x: Any) -> None:
    with T.implicit_replication():
        torch.cat([x, torch.ones(1, x.shape[1])]) + torch.ones(x.shape[1])


def _attention(x: Any) -> None:
    heads = x.unsqueeze(0).unsqueeze(0)
    F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).sum().backward()


RUN: dict[str, Callable[[Any], Any]] = {
    "pointwise": lambda x: x + x * 2,
    "matmul": lambda x: x @ x.t(),
    "reduction": lambda x: x.sum(0),
    "softmax": lambda x: torch.softmax(x, 0),
    "list": lambda x: torch.cat([x, x]),
    "foreach": lambda x: torch._foreach_add([x.detach(), x.detach()], 1),
    "sort": lambda x: x.sort(0),
    "index": lambda x: x[[1, 0]],
    "random": torch.rand_like,
    "decomposed": lambda x: torch.logdet(x.t() @ x),
    "data-dependent": lambda x: x.detach().nonzero(),
    "inference": lambda x: torch.inference_mode()(lambda: F.linear(x.detach(), x.detach()))(),
    "full_tensor": lambda x: x.full_tensor(),
    "repr": repr,
    "backward": _given_back,
    "redistribute": _redistributed,
    "prefetch": _prefetched,
    "writes": _written,
    "copied view": _copied_view,
    "plain beside": _plain_beside,
    "attention": _attention,
    "vmap": lambda x: torch.func.vmap(torch.sin)(x),
}
FAIL: dict[str, Callable[[Any], Any]] = {
    "mixed": lambda x: x + torch.ones(x.shape),
    "mesh": lambda x: x + T.ones(*x.shape, device_mesh=T.Mesh((1, 2)), placements=[T.Replicate()] * 2),
    "shapes": lambda x: x @ x,
    "not laid out": lambda x: x.view(3, 9),
    "not redistributed": lambda x: x.redistribute(placements=[T.Shard(5)]),
    "explicit": lambda x: _explicitly(lambda: x + x.redistribute(placements=[T.Shard(1)])),
    "numpy": lambda x: x.numpy(),
    "backward": lambda x: x.backward(),
}


def _explicitly(run: Callable[[], Any]) -> Any:
    with T.explicit_redistribution():
        return run()


def _left_after(run: Callable[[Any], Any], rows: int) -> list[str]:
    """The tensors that are alive after their last reference has gone: an argument, its local tensor, its gradient."""
    x: Any = distribute(torch.ones(rows, 3), T.Mesh((2,)), "S0").requires_grad_()
    watched = {"argument": weakref.ref(x), "local tensor": weakref.ref(x._local_tensor)}
    run(x)
    if x.grad is not None:
        watched["gradient"] = weakref.ref(x.grad)
    del x
    return [name for name, reference in watched.items() if reference() is not None]


def _left_by(runs: Mapping[str, Callable[[Any], Any]]) -> dict[str, list[str]]:
    # Each with a shape of its own: signatures that are known take another way.
    left = {name: _left_after(run, 7 + place) for place, (name, run) in enumerate(runs.items())}
    return {name: found for name, found in left.items() if found}


def test_arguments_of_new_signatures_die_with_their_last_reference():
    assert run_ranks(2, lambda rank: _left_by(RUN)) == [{}, {}]


def test_arguments_of_calls_that_fail_die_with_their_exception():
    def failing(run: Callable[[Any], Any]) -> Callable[[Any], None]:
        def fails(x: Any) -> None:
            with suppress(T.TritondtError, RuntimeError):
                run(x)
                raise AssertionError("nothing was raised")

        return fails

    runs = {name: failing(run) for name, run in FAIL.items()}
    assert run_ranks(2, lambda rank: _left_by(runs)) == [{}, {}]


def test_a_model_changes_its_dtype_after_a_forward():
    """torch swaps the parameters' tensors then, and refuses on the rank where anything else refers to one."""

    def body(rank):
        model = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4))
        mesh = T.Mesh((2,))
        for module in model:
            for name, parameter in list(module.named_parameters()):
                setattr(module, name, nn.Parameter(distribute(parameter.detach(), mesh, "S0")))
        model(distribute(torch.ones(3, 5), mesh, "R")).sum().backward()
        model.zero_grad()
        return {parameter.dtype for parameter in model.double().parameters()}

    assert run_ranks(2, body) == [{torch.float64}] * 2
