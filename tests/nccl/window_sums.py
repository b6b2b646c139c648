"""Sums in windows on four ranks over the double: `python -m tests.nccl.window_sums add`, with TRITON_INTERPRET=1."""

import importlib
import re

import pytest
import torch

from tests.nccl.devices import device_of, start
from tritondt import nccl

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int8, torch.float64)
LENGTH = 16 * 37  # of bytes; no multiple of the ranks' shares


def terms_of(size: int, call: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """The terms of the ranks, by rank; sums of floats depend on their order."""
    count = LENGTH // dtype.itemsize
    numbers = [(torch.arange(count) * (rank + 3 + call) % 23 - 11).double() for rank in range(size)]
    scale = 1.37 if dtype.is_floating_point else 1
    return [(number * scale ** (2 * rank)).to(dtype) for rank, number in enumerate(numbers)]


def added(terms: list[torch.Tensor]) -> torch.Tensor:
    """The sum in the order of ranks, rounded once."""
    dtype = terms[0].dtype
    total = terms[0].to(torch.float32 if dtype.itemsize == 2 and dtype.is_floating_point else dtype)
    for term in terms[1:]:
        total = total + term
    return total.to(dtype)


def add(rank: int, where: str) -> int:
    """Sums of all dtypes, three each, of which the first begins while others have not come."""
    device = device_of(where)
    with nccl.bootstrap(library=device.library) as communicator:
        for dtype in DTYPES:
            with nccl.WindowSum(communicator, (LENGTH // dtype.itemsize,), dtype, device.kind, num_programs=2) as sums:
                assert sums.multimem == 0  # the double has none, as GPUs without NVLink SHARP
                for call in range(3):
                    terms = terms_of(communicator.num_ranks, call, dtype)
                    sums.tensor.copy_(terms[rank])
                    sums.run()
                    assert torch.equal(sums.tensor.cpu(), added(terms)), (dtype, call)
                assert not sums.is_stopped
    return len(DTYPES)


def refuse(rank: int, where: str) -> None:
    """Sentences of what is refused, on all ranks alike; nothing is registered."""
    device = device_of(where)
    with nccl.bootstrap(library=device.library) as communicator:
        for shape, dtype, options, sentence in (
            ((16,), torch.complex64, {}, "a sum of complex64 in a window; allowed are float32, bfloat16, float16, "),
            (
                (16,),
                torch.int32,
                {"by_multimem": True},
                "multimem has no sum of int32; it adds float32, bfloat16, float16: leave by_multimem out, and peers' "
                "pointers add int32",
            ),
            ((5,), torch.float32, {}, "a window of 20 bytes to be added; allowed is a positive multiple of 16"),
            ((0,), torch.float32, {}, "a window of 0 bytes to be added; allowed is a positive multiple of 16"),
            ((16,), torch.float32, {"num_programs": 33}, "33 programs for a sum in a window; allowed are 1 to 32"),
        ):
            with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
                nccl.WindowSum(communicator, shape, dtype, device.kind, **options)
        with pytest.raises(nccl.NcclUnsupportedError, match="have no multimem"):
            nccl.WindowSum(communicator, (16,), torch.float32, device.kind, by_multimem=True)


def stop(rank: int, where: str) -> bool:
    """Rank 1 does not come; the others end their wait."""
    device = device_of(where)
    with nccl.bootstrap(library=device.library) as communicator:
        sums = nccl.WindowSum(communicator, (16,), torch.float32, device.kind, num_programs=2)
        if rank != 1:
            sums.stop()
            sums.run()
        is_stopped = sums.is_stopped
        sums.close()
    return is_stopped


EXPECTED = {"add": [len(DTYPES)] * 4, "refuse": [None] * 4, "stop": [True, False, True, True]}


def main() -> None:
    """Runs the functions above on all ranks."""
    # A rank imports it by the name of its module, which is not that of what is run.
    module = importlib.import_module("tests.nccl.window_sums")
    with start("host", 4) as ranks:
        for name, expected in EXPECTED.items():
            found = ranks.run(getattr(module, name), "host", timeout_s=360)
            assert found == expected, (name, found)


if __name__ == "__main__":
    main()
