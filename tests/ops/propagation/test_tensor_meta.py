"""Metas of results without fake tensors: what fake tensors say, and without the compiler that these import."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import tritondt as T
from tests.harness.torch_versions import needs_torch_before
from tests.ops.sharded import distribute
from tritondt.comm.transports.threads import run_ranks
from tritondt.ops.propagation import selection, tensor_meta

aten = torch.ops.aten

# Forward and backward passes of most layers; none may find torch's compiler.
EAGER = """
import sys
class Refused:
    def find_spec(self, name, path=None, target=None):
        assert name not in ("torch._dynamo", "torch._inductor"), f"{name} was imported"
sys.meta_path.insert(0, Refused())
import torch
import torch.nn.functional as F
import tritondt as T
from tritondt.comm.transports.threads import run_ranks

def body(rank):
    mesh = T.Mesh((2,))
    x = T.randn(8, 6, device_mesh=mesh, placements=[T.Shard(0)]).requires_grad_()
    weight = T.distribute_tensor(torch.ones(12, 6), mesh, [T.Shard(0)]).requires_grad_()
    tokens = T.distribute_tensor(torch.arange(8) % 6, mesh, [T.Shard(0)])
    heads = x.unflatten(1, (2, 3)).transpose(0, 1).unsqueeze(0)
    mixed = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    losses = [
        F.cross_entropy(x, tokens), F.gelu(F.linear(x, weight)).sum(), F.layer_norm(x, (6,)).softmax(-1).sum(),
        F.rms_norm(x, (6,)).mean(), F.embedding(tokens, weight).sum(), mixed.sum(), F.dropout(x, 0.5).relu().sum(),
        torch.cat([x, x[1:3], x[[0, 1]]]).bfloat16().float().var(), torch.where(x > 0, x, 0).norm(),
        F.mse_loss(x.redistribute(placements=[T.Replicate()]), x * 2), x.split(2, 1)[0].cumsum(0).max(),
    ]
    sum(losses).backward()
    torch._foreach_add_([x.detach()], torch.zeros_like(x).add_(1)[0, 0])
    with torch.no_grad():
        F.linear(x, weight).tril().topk(2)

run_ranks(2, body)
assert "torch._dynamo" not in sys.modules and "torch._inductor" not in sys.modules

# What kept it out ends once somebody imports it.
sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Refused)]
from tritondt.ops.propagation.meta_kernels import _kept_from_traces
functions = _kept_from_traces()
assert functions and all(function.__dict__.get("__dynamo_disable") is function for function in functions)
import torch._dynamo
assert not any(function.__dict__.get("__dynamo_disable") is function for function in functions)
"""


@pytest.mark.extended
@needs_torch_before("2.15", "FakeTensorMode itself imports torch._dynamo.config")
def test_first_operators_import_no_compiler():
    root = Path(__file__).parents[3]
    completed = subprocess.run(
        [sys.executable, "-c", EAGER],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr


X = torch.linspace(-1, 1, 60, dtype=torch.float64).reshape(3, 4, 5)
RUN: dict[str, Callable[[Any], Any]] = {
    "broadcast": lambda x: x + x.sum(0) * x[:, :1],
    "permuted": lambda x: x.permute(2, 0, 1) * x.permute(2, 0, 1).exp(),
    "permuted beside": lambda x: x.transpose(0, 1) + x.transpose(0, 1).contiguous(),
    "of a type": lambda x: (x > 0) | (x.int() / 2 == x.int() // 2),
    "in place": lambda x: x.transpose(0, 2).clone().mul_(2).zero_(),
    "length 1": lambda x: x[:, :1, ::2].neg().abs(),
    "without elements": lambda x: x[:0].transpose(1, 2) + 1,
    "reduced": lambda x: (x.mean((0, 2)), x.var(1), x.amax(-1), x.sum(), x.logsumexp(2)),
    "several": lambda x: (x.sort(0), x.topk(2), x.max(1), torch.var_mean(x, 1)),
    "normed": lambda x: (F.layer_norm(x, (5,)), F.layer_norm(x.bfloat16(), (5,)), x.softmax(1)),
    "products": lambda x: (x @ x.transpose(1, 2), torch.addmm(x[0], x[0][:, :4], x[1]), torch.bmm(x, x.mT)),
    "indexed": lambda x: (x[:, [1, 0]], x.index_select(0, torch.tensor(1)) if x is X else x[:1], x.flip(1)),
    "cut": lambda x: (x.split(2, 1), x.unbind(2), torch.stack([x, x]), torch.cat([x, x], 1)),
    "foreach": lambda x: torch._foreach_mul([x, x.mT], 2),
}


class _Checked:
    """`propagate_tensor_meta` that compares what it says with what fake tensors say."""

    def __init__(self, propagate: Callable[[Any], Any]) -> None:
        self._propagate, self.checked, self.with_fakes = propagate, set[Any](), set[Any]()

    def __call__(self, schema: Any) -> Any:
        found = self._propagate(schema)
        expected = tensor_meta._metas_of(schema.op, tensor_meta._faker.run(schema)[0])
        assert found == expected, f"{schema}: {found}, fake tensors say {expected}"
        self.checked.add(schema.op)
        return found


def test_metas_are_those_of_fake_tensors(monkeypatch):
    checked = _Checked(tensor_meta.propagate_tensor_meta)
    monkeypatch.setattr(selection, "propagate_tensor_meta", checked)

    def body(rank):
        x = distribute(X, T.Mesh((2,)), "S1").requires_grad_()
        for run in RUN.values():
            run(x.detach())
        (F.gelu(F.layer_norm(x, (5,))).softmax(-1) * x).sum().backward()

    run_ranks(2, body)
    assert len(checked.checked) > 35


def test_modes_and_autocast_see_no_trial():
    """What propagation tries is not among what a mode counts."""

    class Seen(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.ops: list[Any] = []

        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.ops.append(op)
            return op(*args, **(kwargs or {}))

    def body(rank):
        x = distribute(X[0], T.Mesh((2,)), "S0")
        with Seen() as seen:
            x.cos()
        assert seen.ops == [aten.cos.default]
        with torch.autocast("cpu", torch.bfloat16):
            product = x.float() @ x.float().t()
        assert product.dtype is torch.bfloat16

    run_ranks(2, body)


def test_what_does_not_fit_is_refused_in_torchs_words():
    def body(rank):
        x = distribute(X[0], T.Mesh((2,)), "S0")
        with pytest.raises(RuntimeError, match=r"same reduction dim, but got \[4, 5\] X \[4, 5\]"):
            torch.mm(x, x)
        with pytest.raises(
            IndexError, match=r"Dimension out of range \(expected to be in range of \[-2, 1\], but got 2\)"
        ):
            torch.cumsum(x, 2)

    run_ranks(2, body)


def test_what_a_fake_refuses_is_raised_and_not_logged(caplog, monkeypatch):
    # Told to nobody above once torch has set up its logging, which any test before this one may have done.
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    monkeypatch.setattr(logger, "handlers", [*logger.handlers, caplog.handler])
    caplog.set_level(logging.ERROR, logger.name)

    def body(rank):
        mesh = T.Mesh((2,))
        with pytest.raises(RuntimeError, match="can't be cast because it is not safe"):
            torch.neg(distribute(X, mesh, "S1"), out=T.empty(0, device_mesh=mesh, dtype=torch.int64))

    run_ranks(2, body)
    assert not caplog.records
    # What others ask of fake tensors is logged as ever.
    with FakeTensorMode(), pytest.raises(RuntimeError):
        torch.empty(2, 3).gather(1, torch.empty(9, 1, dtype=torch.int64))
    assert {record.name for record in caplog.records} == {logger.name}
