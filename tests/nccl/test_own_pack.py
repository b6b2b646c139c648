"""A Triton pack kernel of one's own over NCCL, on a GPU, and interpreted over the test double."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import tritondt as T
from tests.nccl.devices import device_of, start, why_not
from tritondt.cli.bench import own_pack

PAIRS = ("S0->S1", "S1->R", "P->R", "R->S1", "P->S0")


def compare(rank: int, where: str, size: int, dtype: torch.dtype) -> None:
    """Redistributes by the engine and by the kernel, twice, and compares exactly."""
    kind = device_of(where).kind
    meta = T.TensorMeta.contiguous((5, 7), dtype)
    for pair in PAIRS:
        before, after = (T.parse_placements(text) for text in pair.split("->"))
        source, target = (T.DTensorSpec(T.Mesh((size,), device_type=kind), each, meta) for each in (before, after))
        local = torch.randint(-9, 9, source.local_shape, generator=torch.Generator().manual_seed(rank)).to(dtype)
        local = local.to(kind)
        run = own_pack.bind("examples.own_triton_pack:make", local, source, target)
        for _ in range(2):
            torch.testing.assert_close(run(), T.redistribute(local, source, target), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.complex128])
@pytest.mark.parametrize(("where", "size"), [("host", 3), pytest.param("gpu", 2, marks=pytest.mark.gpu)])
def test_a_kernel_packs_what_nccl_sends(where: str, size: int, dtype: torch.dtype) -> None:
    reason = why_not(where, size)
    if reason is not None:
        pytest.skip(reason)
    interpreted = {"TRITON_INTERPRET": "1"} if where == "host" else {}
    with start(where, size, TRITONDT_TIMEOUT="60", **interpreted) as ranks:
        ranks.run(compare, where, size, dtype, timeout_s=200)
