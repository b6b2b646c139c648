"""Which byte goes where, spelled out for boxes of a few thousand bytes."""

from collections.abc import Sequence
from itertools import product

from tritondt.kernels.gpu.loop_nest import LoopNest, Operand
from tritondt.kernels.gpu.pieces import Piece

Bytes = dict[tuple[int, int], tuple[tuple[int, int], ...]]


def bytes_of(nest: LoopNest) -> Bytes:
    """Of every byte that is written, (tensor, position): the bytes that are read for it."""
    return _bytes(nest.lengths, nest.operands)


def bytes_of_pieces(pieces: Sequence[Piece]) -> Bytes:
    """The same of pieces, none of which may write what another has written."""
    found: Bytes = {}
    for piece in pieces:
        own: Bytes = {}
        for behind in range(piece.width):
            operands = [
                operand._replace(
                    offset=operand.offset + behind, strides=tuple(stride * piece.width for stride in operand.strides)
                )
                for operand in piece.operands
            ]
            own.update(_bytes(piece.lengths, operands))
        assert len(own) == piece.num_bytes
        assert not own.keys() & found.keys()
        found.update(own)
    return found


def _bytes(lengths: Sequence[int], operands: Sequence[Operand]) -> Bytes:
    found: Bytes = {}
    for index in product(*map(range, lengths)):
        target, *sources = (
            (operand.tensor, operand.offset + sum(i * stride for i, stride in zip(index, operand.strides, strict=True)))
            for operand in operands
        )
        found[target] = tuple(sources)
    return found
