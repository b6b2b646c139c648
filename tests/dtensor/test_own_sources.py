"""Writes by index from the written tensor itself: refused under every layout, as one device refuses them."""

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
