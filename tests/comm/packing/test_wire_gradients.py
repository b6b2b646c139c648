"""The dtype that gradients travel in where a redistribution's messages are narrower than its tensor."""

from typing import Any

import pytest
import torch

import tritondt as T
from tests.comm.packing.wire_values import equal, numbers, rounded
from tests.ops.sharded import distribute
from tritondt.comm.transports.threads import run_ranks


@pytest.mark.parametrize(
    ("options", "wire_dtype"),
    [
        ({"wire_dtype": torch.bfloat16}, torch.bfloat16),
        ({"wire_dtype": torch.bfloat16, "grad_wire_dtype": torch.float16}, torch.float16),
        ({"wire_dtype": torch.bfloat16, "grad_wire_dtype": torch.float32}, torch.float32),
        ({"grad_wire_dtype": torch.float16}, torch.float16),
    ],
)
def test_gradients_travel_alike_unless_told_otherwise(options: dict[str, Any], wire_dtype: torch.dtype) -> None:
    full = numbers((6, 6), torch.float32, 3)
    arriving = torch.randn(6, 6, generator=torch.Generator().manual_seed(4))

    def body(rank: int) -> None:
        mesh = T.Mesh((3,))
        x = distribute(full, mesh, "S0")
        x.requires_grad_()
        y = x.redistribute(placements=[T.Shard(1)], **options)
        y.backward(distribute(arriving, mesh, "S1"))
        assert isinstance(x.grad, T.DTensor)
        equal(x.grad.to_local(), rounded(arriving, wire_dtype).chunk(3)[rank])

        source, target = (
            T.DTensorSpec(mesh, T.parse_placements(text), T.TensorMeta.contiguous((6, 6))) for text in ("S0", "S1")
        )
        local = full.chunk(3)[rank].clone().requires_grad_()
        found = T.redistribute(local, source, target, **options)
        found.backward(arriving.chunk(3, 1)[rank])
        assert local.grad is not None
        equal(local.grad, rounded(arriving, wire_dtype).chunk(3)[rank])
        equal(found.detach(), rounded(full, options.get("wire_dtype", torch.float32)).chunk(3, 1)[rank])

    run_ranks(3, body)


def test_a_gradient_of_another_dtype_travels_as_it_is() -> None:
    def body(rank: int) -> None:
        x = distribute(torch.ones(4, 4), T.Mesh((2,)), "S0")
        x.requires_grad_()
        whole = [T.Replicate()]
        x.redistribute(placements=whole, backward_dtype=torch.bfloat16, wire_dtype=torch.bfloat16).sum().backward()
        assert isinstance(x.grad, T.DTensor)
        equal(x.grad.full_tensor(), torch.ones(4, 4))
        with pytest.raises(T.TransportError, match="were asked for a tensor of float16"):
            x.redistribute(placements=whole, backward_dtype=torch.float16, wire_dtype=torch.bfloat16)

    run_ranks(2, body)


def test_gradients_of_gradients() -> None:
    full = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5))

    def body(rank: int) -> None:
        mesh, meta = T.Mesh((2,)), T.TensorMeta.contiguous((4, 4), torch.float64)
        source, target = (T.DTensorSpec(mesh, T.parse_placements(text), meta) for text in ("S0", "S1"))
        local = full.chunk(2)[rank].clone().requires_grad_()
        found = T.redistribute(local, source, target, wire_dtype=torch.float32)
        (grad,) = torch.autograd.grad(found.square().sum(), local, create_graph=True)
        equal(grad.detach(), 2 * rounded(full, torch.float32).chunk(2)[rank])
        (second,) = torch.autograd.grad(grad.sum(), local)
        equal(second, torch.full((2, 4), 2.0, dtype=torch.float64))

    run_ranks(2, body)
