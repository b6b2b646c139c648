"""Writes from the written memory: refused by index from the tensor itself under every layout, as one device does.

What two views share, one device refuses by addresses and strides, which are not alike on all ranks.
"""

import pytest
import torch

import tritondt as T
from tests.ops.distinct import numbers
from tests.ops.sharded import distribute
from tritondt.comm.transports.threads import run_ranks

WRITES = {
    "scatter_": lambda x, rows, like: x.scatter_(1, like, x),
    "scatter_add_": lambda x, rows, like: x.scatter_add_(1, like, x),
    "scatter_reduce_": lambda x, rows, like: x.scatter_reduce_(1, like, x, "amax"),
    "index_add_": lambda x, rows, like: x.index_add_(0, rows, x),
    "index_copy_": lambda x, rows, like: x.index_copy_(0, rows, source=x),
    "index_put_": lambda x, rows, like: x.index_put_((rows,), x, accumulate=True),
    "put_": lambda x, rows, like: x.put_(like, x),
    "index_fill_": lambda x, rows, like: rows.index_fill_(0, rows, 2),
    "its own indices": lambda x, rows, like: like.scatter_add_(0, like, like),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("text", ["R", "S0", "S1"])
def test_a_write_by_index_does_not_read_from_what_it_writes_to(name, text):
    with pytest.raises(RuntimeError, match="refer to a single memory location"):
        WRITES[name](numbers(4, 4), torch.arange(4), torch.zeros(4, 4, dtype=torch.long))

    def body(rank):
        mesh = T.Mesh((2,))
        x, like = distribute(numbers(4, 4), mesh, text), distribute(torch.zeros(4, 4, dtype=torch.long), mesh, text)
        rows = distribute(torch.arange(4), mesh, "R")
        with pytest.raises(T.PropagationError, match="while it writes to it, in an order that is not defined; read"):
            WRITES[name](x, rows, like)
        torch.testing.assert_close(x.full_tensor(), numbers(4, 4), rtol=0, atol=0)

    run_ranks(2, body)


# A write through one view of x of what another one has, which `read` may copy first.
OF_VIEWS = {
    "mul_": lambda x, read: x.mul_(read(x.mT)),
    "view_as": lambda x, read: x.mT.mul_(read(x.mT.view_as(x.mT))),
    "copy_": lambda x, read: x.copy_(read(x.mT)),
    "out": lambda x, read: torch.add(x, read(x.mT), out=x),
    "addcmul_": lambda x, read: x.addcmul_(read(x.mT), x, value=2),
    "index_put_": lambda x, read: x.index_put_((torch.zeros_like(x[0, :, 0]).long(),), read(x.mT[:1])),
    "a row": lambda x, read: x[:, :1, :3].add_(read(x[:, :1, 1:])),
}


@pytest.mark.parametrize("text", ["S0", "R", "S1"])
@pytest.mark.parametrize("name", OF_VIEWS)
def test_a_write_from_another_view_of_its_memory_reads_what_was_there_before(name, text):
    whole = numbers(2, 4, 4)
    OF_VIEWS[name](whole, torch.Tensor.clone)

    def body(rank):
        # One rank has no elements under S0, and cannot see that the others' share memory.
        x = distribute(numbers(2, 4, 4), T.Mesh((3,)), text)
        OF_VIEWS[name](x, lambda view: view)
        torch.testing.assert_close(x.full_tensor(), whole, rtol=0, atol=0)

    run_ranks(3, body)


def test_a_list_goes_on_at_the_position_that_torch_refused():
    def body(rank):
        x, other = (distribute(numbers(2, 4, 4), T.Mesh((2,)), "R") for _ in range(2))
        torch._foreach_add_([other, x], [other * 0 + 1, x.mT])
        torch.testing.assert_close(other.full_tensor(), numbers(2, 4, 4) + 1, rtol=0, atol=0)
        torch.testing.assert_close(x.full_tensor(), numbers(2, 4, 4) + numbers(2, 4, 4).mT, rtol=0, atol=0)

    run_ranks(2, body)
