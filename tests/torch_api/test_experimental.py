"""What torch's docstrings say of torch.distributed.tensor.experimental and .debug, and how much of all has a test."""

from types import ModuleType
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import tests.torch_api.test_dtensor
import tests.torch_api.test_factories
import tests.torch_api.test_parallel
import tritondt as T
from tests.torch_api.behaviours import NUM_RANKS, Behaviour, behaviour, behaviours_of, documented, with_tests
from tests.torch_api.test_dtensor import ROWS, WHOLE, exactly, line, sharded
from tritondt.comm.transports.threads import run_ranks
from tritondt.debug import CommDebugMode, visualize_sharding
from tritondt.errors import LayoutError, MixedTensorsError
from tritondt.experimental import implicit_replication, local_map, register_sharding
from tritondt.parallel import ColwiseParallel, context_parallel_shard, parallelize_module, ring_attention

# Behaviours that are not here, with the reason.
NOT_HERE = {
    **dict.fromkeys([("distribute_module", "note 1"), ("distribute_tensor", "note 1")], "of XLA's devices"),
    ("Shard", "note 2"): "_StridedShard is `order` here",
    **dict.fromkeys(
        [("context_parallel", item) for item in ("buffers", "no_restore_buffers", "note 1")],
        "functions that are called, where torch changes buffers and attention within a context",
    ),
    **dict.fromkeys(
        [(f"CommDebugMode.{name}", "summary") for name in ("log_comm_debug_tracing_table_to_file",)],
        "str() of it in place of a file",
    ),
    ("loss_parallel", "note 1"): "an example",
}


@behaviour("implicit_replication", "summary", "note 1")
def _(rank: int) -> None:
    with pytest.raises(MixedTensorsError):
        sharded() + WHOLE
    with implicit_replication():
        exactly(cast(Any, sharded() + WHOLE).full_tensor(), WHOLE + WHOLE)
        # What is no replica is taken for one: every rank's own numbers go into its part.
        exactly(cast(Any, sharded() + rank * torch.ones(10, 4)).to_local(), ROWS[rank] + rank)


@behaviour("local_map", "summary", "func", "out_placements", "returns", "note 1")
def _(rank: int) -> None:
    def doubled(x: torch.Tensor, factor: int) -> Any:
        assert type(x) is torch.Tensor
        return x * factor, "text"

    found, text = local_map(doubled, out_placements=([T.Shard(0)], None))(sharded(), 3)
    assert text == "text"
    assert found.placements == (T.Shard(0),)
    exactly(found.full_tensor(), WHOLE * 3)
    plain, _ = local_map(doubled, out_placements=([T.Shard(0)], None))(WHOLE, 2)  # no distributed argument
    exactly(plain, WHOLE * 2)
    terms = local_map(lambda x: x.sum(0), out_placements=[T.Partial()])(sharded())
    exactly(terms.full_tensor(), WHOLE.sum(0))


@behaviour("local_map", "in_placements", "redistribute_inputs")
def _(rank: int) -> None:
    wanted: Any = {"out_placements": [T.Shard(1)], "in_placements": ([T.Shard(1)],)}
    with pytest.raises(LayoutError, match="where it needs"):
        local_map(torch.cumsum, **{**wanted, "in_placements": ([T.Shard(1)], None)})(sharded(), 0)
    found = local_map(lambda x: x.cumsum(0), **wanted, redistribute_inputs=True)(sharded())
    exactly(found.full_tensor(), WHOLE.cumsum(0))
    exactly(local_map(lambda x: x + 1, **wanted)(WHOLE), WHOLE + 1)  # a plain tensor is passed on


@behaviour("local_map", "in_grad_placements")
def _(rank: int) -> None:
    leaf = T.distribute_tensor(WHOLE.clone().requires_grad_(), line(), [T.Replicate()])
    own = local_map(
        lambda x: x[2 * rank : 2 * rank + 2],
        out_placements=[T.Shard(0)],
        in_placements=([T.Replicate()],),
        in_grad_placements=([T.Partial()],),
    )(leaf)
    own.sum().backward()
    expected = torch.zeros(10, 4)
    expected[:8] = 1
    exactly(cast(Any, leaf.grad).full_tensor(), expected)


@behaviour("local_map", "device_mesh")
def _(rank: int) -> None:
    found = local_map(lambda x: x * 2, out_placements=[T.Shard(0)], device_mesh=line())(sharded())
    assert found.device_mesh is line()
    assert local_map(lambda x: x * 2, out_placements=[T.Shard(0)])(sharded()).device_mesh is line()


_LIBRARY = torch.library.Library("torch_api_tests", "DEF")
_LIBRARY.define("shifted(Tensor x, int by) -> Tensor")
_LIBRARY.impl("shifted", lambda x, by: x + by, "CompositeExplicitAutograd")
_SHIFTED = torch.ops.torch_api_tests.shifted.default


@register_sharding(_SHIFTED)
def _shifted_sharding(x: Any, by: int) -> Any:
    assert x.ndim == 2
    return [([T.Replicate()], [T.Replicate(), None]), ([T.Shard(0)], [T.Shard(0), None])]


@behaviour("register_sharding", "summary", "op", "returns", "note 1")
def _(rank: int) -> None:
    x = sharded()
    with CommDebugMode() as comm:
        found = _SHIFTED(x, 3)
    assert comm.get_total_counts() == 0
    assert found.placements == (T.Shard(0),)
    exactly(found.full_tensor(), WHOLE + 3)
    columns = T.distribute_tensor(WHOLE, line(), [T.Shard(1)])  # what is not acceptable is moved to what is
    exactly(_SHIFTED(columns, 3).full_tensor(), WHOLE + 3)


@behaviour("context_parallel", "summary", "mesh", "buffer_seq_dims")
def _(rank: int) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 10, 4, dtype=torch.float64)  # (batch, heads, sequence, width), 10 over 4 ranks
    own_q, own_k, own_v = (context_parallel_shard(x, line(), 2) for x in (q, k, v))
    found = ring_attention(own_q, own_k, own_v, line(), length=10, is_causal=True)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert_close(found, context_parallel_shard(expected, line(), 2))


# Debugging --------------------------------------------------------------------------------------------------------


@behaviour("CommDebugMode", "summary", "note 1")
@behaviour("CommDebugMode.get_comm_counts", "summary", "returns")
def _(rank: int) -> None:
    x = sharded()
    with CommDebugMode() as comm:
        x.redistribute(placements=[T.Replicate()])
        x.redistribute(placements=[T.Shard(1)])
    counts: Any = comm.get_comm_counts()
    assert isinstance(counts, dict)
    assert counts[torch.ops.c10d_functional.all_gather_into_tensor] == 1
    assert counts[torch.ops.c10d_functional.all_to_all_single] == 1


@behaviour("CommDebugMode.generate_json_dump", "summary")
@behaviour("CommDebugMode.generate_comm_debug_tracing_table", "summary")
def _(rank: int) -> None:
    model = parallelize_module(torch.nn.Linear(4, 8), line(), ColwiseParallel(output_layouts=T.Replicate()))
    with CommDebugMode() as comm:
        model(WHOLE)
    assert "Linear" in comm.to_json()  # by module, of whatever kind
    assert "Linear" in str(comm)
    assert "(S1) -> (R)" in str(comm)


@behaviour("visualize_sharding", "summary", "note 1")
def _(rank: int) -> None:
    visualize_sharding(sharded())
    visualize_sharding(T.zeros((0, 4), device_mesh=line(), placements=[T.Shard(0)]))


@pytest.mark.parametrize("found", behaviours_of(__name__), ids=str)
def test_behaviour(found: Behaviour) -> None:
    run_ranks(NUM_RANKS, found.run)


def test_pictures_of_tensors_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(1, lambda rank: visualize_sharding(T.ones(4, 4, device_mesh=T.Mesh((1,)), placements=[T.Shard(0)])))
    assert "0" in capsys.readouterr().out


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the docstrings of torch 2.13 are counted")
def test_nine_in_ten_of_what_torch_describes_have_a_test() -> None:
    debug = pytest.importorskip("torch.distributed.tensor.debug", exc_type=ImportError)  # it imports NumPy
    modules: list[ModuleType] = [
        tests.torch_api.test_dtensor,
        tests.torch_api.test_factories,
        tests.torch_api.test_parallel,
    ]
    assert all(behaviours_of(module.__name__) for module in modules)
    described = documented(debug)
    missing = [each for each in described if each not in with_tests()]
    assert [each for each in missing if each not in NOT_HERE] == []
    assert len(described) >= 150
    assert len(missing) <= len(described) / 10, f"{len(missing)} of {len(described)}"
