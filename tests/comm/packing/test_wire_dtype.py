"""Redistributions whose messages are narrower than their tensors: values, bytes, and what is refused."""

from typing import Any

import pytest
import torch

import tritondt as T
from tests.comm.packing.wire_values import equal, numbers, rounded
from tests.harness.oracle import arithmetic
from tests.harness.torch_versions import GRAPHS, needs_torch
from tests.ops.sharded import distribute
from tritondt.comm import world
from tritondt.comm.communicator import Transfer
from tritondt.comm.packing.wire_cast import casting_transfer
from tritondt.comm.transports.threads import run_ranks
from tritondt.debug import CommDebugMode
from tritondt.kernels import reference
from tritondt.kernels.boxes import SCALE_BYTES, CastBox
from tritondt.planning.exchange import exchange
from tritondt.planning.storage import blocks


@pytest.mark.parametrize(("target", "again"), [("S0", False), ("S1", False), ("R", True)])
def test_a_sum_by_torch(target: str, again: bool) -> None:
    terms = [numbers((9, 7), torch.float32, rank).nan_to_num(1.0, 2.0, 3.0).clamp(-1e4, 1e4) for rank in range(4)]
    total = terms[0].bfloat16().float()
    for term in terms[1:]:
        total = total + term.bfloat16().float()
    whole = rounded(total, torch.bfloat16) if again else total

    def body(rank: int) -> None:
        mesh, meta = T.Mesh((4,)), T.TensorMeta.contiguous((9, 7))
        source, after = (T.DTensorSpec(mesh, T.parse_placements(text), meta) for text in ("P", target))
        found = T.redistribute(terms[rank], source, after, wire_dtype=torch.bfloat16)
        indices = arithmetic.held_indices((4,), after.placements, (9, 7), (rank,))
        equal(found, arithmetic.take(whole, indices))

    run_ranks(4, body)


def test_what_needs_no_message_is_not_rounded() -> None:
    full = numbers((6, 4), torch.float32, 1)

    def body(rank: int) -> None:
        x = distribute(full, T.Mesh((2,)), "R")
        equal(x.redistribute(placements=[T.Shard(0)], wire_dtype=torch.float16).to_local(), full.chunk(2)[rank])
        equal(x.redistribute(placements=[T.Replicate()], wire_dtype=torch.float16).to_local(), full)
        own = distribute(full, T.Mesh((2,)), "S0").redistribute(placements=[T.Shard(1)], wire_dtype=torch.float32)
        equal(own.to_local(), full.chunk(2, 1)[rank])

    run_ranks(2, body)


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("source", ["S0", "S1", "P"])
def test_dtensors_in_half_the_bytes(source: str, async_op: bool) -> None:
    full = torch.arange(77.0).reshape(7, 11)

    def moved(x: T.DTensor, **options: Any) -> tuple[torch.Tensor, int]:
        with CommDebugMode() as comm:
            whole = x.redistribute(placements=[T.Replicate()], async_op=async_op, **options).to_local()
        return whole, comm.get_sent_bytes()

    def body(rank: int) -> None:
        x = distribute(full, T.Mesh((3,)), source)
        traffic = world.current().communicator(range(3)).traffic
        _, wide = moved(x)
        before = traffic.sent_bytes
        found, narrow = moved(x, wire_dtype=torch.bfloat16)
        equal(found, full)
        assert narrow * 2 == wide
        assert traffic.sent_bytes - before == narrow > 0

    run_ranks(3, body)


def test_prefetch_is_found_with_the_same_wire_dtype_only() -> None:
    full = numbers((8, 5), torch.float32, 2)

    def body(rank: int) -> None:
        x = distribute(full, T.Mesh((2,)), "S0")
        T.prefetch(x, [T.Replicate()], wire_dtype=torch.bfloat16)
        equal(x.redistribute(placements=[T.Replicate()]).to_local(), full)
        traffic = world.current().communicator(range(2)).traffic
        before = traffic.num_sent
        found = x.redistribute(placements=[T.Replicate()], wire_dtype=torch.bfloat16)
        equal(found.to_local(), rounded(full, torch.bfloat16))
        assert traffic.num_sent == before

    run_ranks(2, body)


@needs_torch("2.12", GRAPHS)
def test_a_graph_knows_the_wire_dtype() -> None:
    full = numbers((6, 4), torch.float32, 6)

    def body(rank: int) -> None:
        x = distribute(full, T.Mesh((2,)), "S0")

        @torch.compile(backend="aot_eager", fullgraph=True)
        def whole(x: T.DTensor) -> T.DTensor:
            moved = x.redistribute(placements=[T.Replicate()], wire_dtype=torch.bfloat16) * 1.0
            assert isinstance(moved, T.DTensor)
            return moved

        equal(whole(x).to_local(), rounded(full, torch.bfloat16))

    run_ranks(2, body)


def test_a_part_for_several_peers_is_packed_once_and_nothing_goes_past_the_buffers() -> None:
    before, after = (T.Layout((4,), T.parse_placements(text), (8, 3)) for text in ("S0", "R"))
    transfer = Transfer(
        exchange(before, after, (1,)),
        (blocks(before, (1,)),),
        (blocks(after, (1,)),),
        (torch.float32,),
        (None,),
        1,
        "a test",
        wire_dtype=torch.bfloat16,
    )
    found = casting_transfer(transfer, torch.bfloat16)
    assert [tuple(item) for item in found.sends] == [(2, None, 0, 12), (3, None, 0, 12), (0, None, 0, 12)]
    assert [tuple(item) for item in found.receives] == [(2, None, 0, 12), (3, None, 12, 12), (0, None, 24, 12)]
    assert (found.packed_bytes, found.staged_bytes, found.sent_bytes, found.received_bytes) == (12, 36, 36, 36)
    assert found.pack is not None
    assert found.pack.num_boxes == 1


def test_each_part_has_a_scale_of_its_own() -> None:
    """Rows of 1e-6 and rows of 1e6 keep their digits alike, as the reference gives them."""
    full = numbers((12, 5), torch.float32, 7).nan_to_num(0.0, 1.0, 2.0).clamp(-1.0, 1.0)
    full *= torch.tensor([1e-6] * 3 + [1.0] * 3 + [1e6] * 3 + [0.0] * 3)[:, None]
    expected = torch.empty_like(full)
    for rows, out in zip(full.chunk(4), expected.chunk(4), strict=True):
        sent, scales, box = (
            torch.empty(15).to(torch.float8_e4m3fn),
            torch.empty(1),
            CastBox(0, 0, 0, 0, (15,), (1,), (1,)),
        )
        reference.quantize_boxes([rows.flatten()], [sent], scales, [box])
        reference.dequantize_boxes([sent], [out.view(-1)], scales, [box])

    def body(rank: int) -> None:
        x = distribute(full, T.Mesh((4,)), "S0")
        traffic = world.current().communicator(range(4)).traffic
        found = x.redistribute(placements=[T.Replicate()], wire_dtype=torch.float8_e4m3fn).to_local()
        equal(found, expected)
        assert traffic.sent_bytes == 3 * (SCALE_BYTES + 15)

    run_ranks(4, body)


@pytest.mark.parametrize(
    ("dtype", "wire_dtype", "text"),
    [
        (
            torch.float32,
            torch.float64,
            "messages of torch.float64 were asked for a tensor of float32; "
            "allowed for float32 is bfloat16, float16, float8_e4m3fn, float8_e5m2 and its own",
        ),
        (torch.float64, torch.float8_e4m3fn, "allowed for float64 is float32, bfloat16, float16 and its own"),
        (torch.float32, torch.int8, "messages of torch.int8 were asked for a tensor of float32"),
        (torch.float64, "bfloat16", "messages of 'bfloat16' .* is float32, bfloat16, float16 and its own"),
        (torch.bfloat16, torch.float16, "allowed for bfloat16 is float8_e4m3fn, float8_e5m2 and its own"),
        (torch.float16, torch.float32, "allowed for float16 is float8_e4m3fn, float8_e5m2 and its own"),
        (torch.int32, torch.bfloat16, "were asked for a tensor of int32; allowed for int32 is its own"),
        (torch.complex64, torch.bfloat16, "allowed for complex64 is its own"),
    ],
)
def test_what_is_refused_on_all_ranks(dtype: torch.dtype, wire_dtype: Any, text: str) -> None:
    def body(rank: int) -> str:
        mesh, meta = T.Mesh((2,)), T.TensorMeta.contiguous((4, 2), dtype)
        source, target = (T.DTensorSpec(mesh, T.parse_placements(way), meta) for way in ("S0", "S1"))
        x = T.DTensor.from_local(torch.ones(2, 2, dtype=dtype), mesh, [T.Shard(0)])
        calls = [
            lambda: T.redistribute(x.to_local(), source, target, wire_dtype=wire_dtype),
            lambda: T.redistribute(x.to_local(), source, target, grad_wire_dtype=wire_dtype),
            lambda: x.redistribute(placements=[T.Shard(1)], wire_dtype=wire_dtype),
            lambda: x.redistribute(placements=[T.Shard(1)], wire_dtype=wire_dtype, async_op=True),
            lambda: T.prefetch(x, [T.Shard(1)], wire_dtype=wire_dtype),
            lambda: T.explain(source, target, wire_dtype=wire_dtype),
        ]
        said = set()
        for call in calls:
            with pytest.raises(T.TransportError, match=text) as found:
                call()
            said.add(str(found.value))
        (only,) = said
        traffic = world.current().communicator(range(2)).traffic
        assert (traffic.num_sent, traffic.num_received) == (0, 0)
        # Nothing is lost.
        torch.testing.assert_close(x.full_tensor(), torch.ones(4, 2, dtype=dtype), rtol=0, atol=0)
        return only

    first, second = run_ranks(2, body)
    assert first == second


def test_ranks_that_ask_for_different_wire_dtypes_are_told() -> None:
    def body(rank: int) -> None:
        x = distribute(torch.ones(4, 4), T.Mesh((2,)), "S0")
        x.redistribute(placements=[T.Shard(1)], wire_dtype=(torch.bfloat16, torch.float16)[rank])

    with pytest.raises(T.MismatchError, match=r"float32 as (bfloat16|float16)"):
        run_ranks(2, body)
