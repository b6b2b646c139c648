"""A Triton kernel of one's own that reads peers' memory: rows of all ranks, gathered into the tiles of a product.

`torchrun --nproc-per-node 4 examples/own_fused_kernel.py`, on a GPU for each rank, which NVLink connects. Without GPUs,
`--double PATH` names a libnccl.so.2 that works on the host, and Triton interprets the kernel.
"""

import argparse
import os

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--double", metavar="PATH", help="a libnccl.so.2 that works on the host")
    double = parser.parse_args().double
    if double is not None:
        os.environ["TRITON_INTERPRET"] = "1"  # which Triton reads when a kernel is defined

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from tritondt import nccl
from tritondt.kernels.gpu.signals import await_all, publish

# A rank's rows and its words are there twice, for calls in turns: who has begun a call may still read those of the
# call before. Nobody has come to the call after before all have awaited this rank's word of this one, behind the last
# read of the one before.
NUM_TURNS = 2


@triton.jit(do_not_specialize=("rank", "turn", "count"))
def gathered_product(
    rows_at,
    words_at,
    weight,
    product,
    asked,
    rank,
    turn,
    count,
    num_rows,
    inner,
    num_columns,
    NUM_RANKS: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
):
    """One tile of the product: told that this rank's rows are there, it waits for the rank whose rows it needs."""
    tile = tl.program_id(0)
    peers = tl.arange(0, RANKS)
    if tile == 0:  # the rows were written by earlier launches, and the first program is the first to have a place
        theirs = tl.load(words_at + peers, mask=peers < NUM_RANKS, other=0) + (turn * NUM_RANKS + rank) * 8
        publish(theirs.to(tl.pointer_type(tl.int64)), count + peers * 0, peers < NUM_RANKS)
    tiles_across = tl.cdiv(num_columns, COLUMNS)
    tiles_of_rank = tl.cdiv(num_rows, ROWS) * tiles_across
    source = (rank + tile // tiles_of_rank) % NUM_RANKS  # own rows first, and each rank reads another peer
    words = tl.load(words_at + rank).to(tl.pointer_type(tl.int64)) + turn * NUM_RANKS + peers
    if await_all(words, count + peers * 0, peers == source, asked) == 0:
        row = tile % tiles_of_rank // tiles_across * ROWS + tl.arange(0, ROWS)
        column = tile % tiles_across * COLUMNS + tl.arange(0, COLUMNS)
        rows = tl.load(rows_at + source).to(tl.pointer_type(tl.float32)) + (turn * num_rows + row[:, None]) * inner
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, inner, INNER):
            along = start + tl.arange(0, INNER)
            left = tl.load(rows + along[None, :], mask=(row[:, None] < num_rows) & (along[None, :] < inner), other=0)
            right = tl.load(
                weight + along[:, None] * num_columns + column[None, :],
                mask=(along[:, None] < inner) & (column[None, :] < num_columns),
                other=0,
            )
            total = tl.dot(left, right, total, input_precision="ieee")
        tl.store(
            product + (source * num_rows + row[:, None]) * num_columns + column[None, :],
            total,
            mask=(row[:, None] < num_rows) & (column[None, :] < num_columns),
        )


class GatheredProduct:
    """The product of all ranks' rows, one block below the other, and a weight that each rank has: one launch.

    Made by all ranks of a communicator together, for rows of one shape on all of them; float32. `close` ends it,
    collectively: when all ranks have run the same number of calls to their end.
    """

    def __init__(self, communicator: nccl.Communicator, num_rows: int, inner: int, device: torch.device) -> None:
        self._rank, self._num_ranks, library = communicator.rank, communicator.num_ranks, communicator.library
        self._rows = nccl.empty((NUM_TURNS, num_rows, inner), torch.float32, device, library)
        self._words = nccl.empty((NUM_TURNS, self._num_ranks), torch.int64, device, library).zero_()
        # The host ends all waits by it. No rank may write into another one's words before they are zero.
        self.asked = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self._windows = [communicator.register_window(each) for each in (self._rows, self._words)]
        self._pointers = [window.peer_pointers() for window in self._windows]
        self._num_calls = 0

    def __call__(self, rows: torch.Tensor, weight: torch.Tensor, tile: tuple[int, int, int]) -> torch.Tensor:
        """The product, (num_ranks * num_rows, num_columns), in tiles of so many rows, columns and inner elements."""
        self._num_calls += 1
        turn, count = self._num_calls % NUM_TURNS, self._num_calls
        self._rows[turn].copy_(rows)
        (num_rows, inner), num_columns = rows.shape, weight.shape[1]
        product = torch.empty(self._num_ranks * num_rows, num_columns, device=rows.device)
        grid = (self._num_ranks * triton.cdiv(num_rows, tile[0]) * triton.cdiv(num_columns, tile[1]),)
        gathered_product[grid](
            *(*self._pointers, weight, product, self.asked, self._rank, turn, count, num_rows, inner, num_columns),
            *(self._num_ranks, triton.next_power_of_2(self._num_ranks), *tile),
        )
        return product

    def close(self) -> None:
        """Ends the windows."""
        for window in self._windows:
            window.close()


if __name__ == "__main__":
    if double is None and not torch.cuda.is_available():
        parser.exit(1, "torch sees no GPU here: --double PATH names a libnccl.so.2 that works on the host\n")
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    if double is None:
        torch.cuda.set_device(rank)
    device = torch.device("cpu" if double else "cuda")
    library = nccl.library(double)
    with nccl.bootstrap(library=library) as communicator:
        fused = GatheredProduct(communicator, 5, 24, device)
        weight = (torch.arange(24.0 * 40) % 7 - 3).reshape(24, 40).to(device)
        for call in range(3):
            every = [torch.arange(120.0, device=device).reshape(5, 24) % (11 + other + call) for other in range(size)]
            found = fused(every[rank], weight, (16, 16, 16))
            assert torch.equal(found, torch.cat(every) @ weight)  # whole numbers: no order of sums changes them
        dist.barrier()
        fused.close()
    print(f"rank {rank}: {tuple(found.shape)}, as gathered and multiplied apart")
    dist.destroy_process_group()
