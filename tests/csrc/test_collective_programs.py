"""Programs of collectives that cannot be, which the extension refuses."""

import pytest

from tritondt._C import ByteMoves, OneShotReduction, PiecewiseReduction, Reducer


def reducer(own: int = 0, dtype: str = "float32", op: str = "sum") -> Reducer:
    return Reducer(dtype=dtype, op=op, divisor=1, places=[0, 1], own=own, chunk_bytes=64)


def test_programs_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="chunks of 100 bytes; allowed are multiples of 64"):
        ByteMoves(chunk_bytes=100, sends=[], receives=[], keeps=[], is_past_cache=False)
    with pytest.raises(ValueError, match="a reduction among 2 ranks of 1 pieces to 1"):
        PiecewiseReduction(reducer(), pieces=[(0, 0, 8)], results=[(0, 0, 8)], is_past_cache=False)
    with pytest.raises(ValueError, match="position 2 of 2"):
        OneShotReduction(reducer(own=2), source=(0, 0, 8), target=(0, 0, 8), root=-1)
    with pytest.raises(ValueError, match="op 'sum' on dtype 'bool'; allowed on it are max, min"):
        reducer(dtype="bool")
    allowed = "bitwise are band, bor and bxor, on bool, uint8, int8, int16, int32 and int64"
    with pytest.raises(ValueError, match=f"op 'bxor' on dtype 'float32'; {allowed}"):
        reducer(op="bxor")
