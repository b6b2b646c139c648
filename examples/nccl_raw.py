"""Raw collectives of NCCL on two ranks: `torchrun --nproc-per-node 2 examples/nccl_raw.py`, on one GPU or two.

Without a GPU, `--double PATH` names a libnccl.so.2 that works on the host, as tests/doubles/fake_nccl builds one.
"""

import argparse
import ctypes
import os

import torch
import torch.distributed as dist

from tritondt import nccl

# What two ranks need to share one GPU, from NCCL 2.30.7 on: they take turns, and leave each other room.
SHARING = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "1",
    "NCCL_MAX_CTAS": "4",
    "NCCL_MAX_P2P_NCHANNELS": "4",
}

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--double", metavar="PATH", help="a libnccl.so.2 that works on the host")
double = parser.parse_args().double
if double is None and not torch.cuda.is_available():
    parser.exit(1, "torch sees no GPU here: --double PATH names a libnccl.so.2 that works on the host\n")
dist.init_process_group("gloo")
rank, others = dist.get_rank(), [peer for peer in range(dist.get_world_size()) if peer != dist.get_rank()]
if double is None:
    if torch.cuda.device_count() < dist.get_world_size():
        os.environ.update(SHARING)
    torch.cuda.set_device(rank % torch.cuda.device_count())
device = torch.device("cpu" if double else "cuda")
library = nccl.library(double)


def wait_for_stream() -> None:
    """Lets the host wait until the default stream has run everything."""
    if double is None:
        torch.cuda.synchronize()
    else:
        ctypes.CDLL(double).fakeStreamSynchronize(None)


def say(what: str, *tensors: torch.Tensor) -> None:
    """Prints what this rank got."""
    wait_for_stream()
    print(f"rank {rank}: {what} {[tensor.tolist() for tensor in tensors]}", flush=True)


with nccl.bootstrap(library=library) as communicator:
    tensor = torch.full((3,), rank + 1.0, device=device)
    communicator.all_reduce(tensor)
    say("all_reduce", tensor)

    mine = torch.full((rank + 1,), float(rank), device=device)  # a length of its own on every rank
    parts = [torch.empty(peer + 1, device=device) for peer in range(communicator.num_ranks)]
    communicator.all_gather_v(mine, parts)
    say("all_gather_v", *parts)

    with communicator.pre_mul_sum(0.5, torch.float32) as half_of_the_sum:
        communicator.all_reduce(tensor, op=half_of_the_sum)
        say("all_reduce by pre_mul_sum", tensor)

    part = communicator.split(color=rank % 2, key=rank)
    assert part is not None
    with part:
        part.all_reduce(tensor)
        say(f"split, rank {part.rank} of {part.num_ranks}", tensor)

    if library.has("ncclCommWindowRegister"):
        memory = nccl.empty((communicator.num_ranks + 1,), torch.float32, device, library).zero_()
        arrived, own = memory[:-1], memory[-1:].fill_(rank + 10.0)  # what is put lies in a window, too
        wait_for_stream()
        try:
            with communicator.register_window(memory) as window:
                if library.has("ncclPutSignal"):
                    window.put([(peer, own, own.itemsize * rank) for peer in others])
                    window.wait_signals(dict.fromkeys(others, 1))
                    say("put", arrived)
        except nccl.NcclUnsupportedError as error:  # these ranks share no symmetric memory
            print(f"rank {rank}: {error}", flush=True)

    if library.has("ncclCommShrink") and rank == 0:
        with communicator.shrink(excluded=others) as smaller:
            smaller.all_reduce(tensor)
            say(f"shrink to {smaller.num_ranks}", tensor)

dist.destroy_process_group()
