"""Arguments of several dtypes, which an operator on one device refuses: refused on all ranks, outside the mesh too."""

import pytest
import torch
import torch.nn.functional as F

import tritondt as T
from tritondt.comm.transports.threads import run_ranks

aten = torch.ops.aten

# Of a tensor x of (2, 2) and another one of its shape, y, of another dtype.
CALLS = {
    "setitem": lambda x, y, index: x.__setitem__(([0],), y.sum()),
    "index_put_": lambda x, y, index: x.index_put_((index,), y),
    "index_put": lambda x, y, index: x.index_put((index,), y, accumulate=True),
    "_unsafe_index_put": lambda x, y, index: aten._unsafe_index_put(x, [index], y),
    "index_copy_": lambda x, y, index: x.index_copy_(0, index, y),
    "index_add": lambda x, y, index: x.index_add(0, index, y),
    "index_reduce_": lambda x, y, index: x.index_reduce_(0, index, y, "prod"),
    "put_": lambda x, y, index: x.put_(index, y[0]),
    "mm": lambda x, y, index: x @ y,
    "addmm": lambda x, y, index: torch.addmm(y, x, x),
    "mv": lambda x, y, index: x.mv(y[0]),
    "addmv": lambda x, y, index: torch.addmv(x[0], x, y[0]),
    "linear": lambda x, y, index: F.linear(x, y),
    "cross": lambda x, y, index: torch.linalg.cross(x.repeat(1, 3)[:, :3], y.repeat(1, 3)[:, :3]),
    "heaviside": lambda x, y, index: torch.heaviside(x, y),
    "binary_cross_entropy": lambda x, y, index: F.binary_cross_entropy(x, y),
}


@pytest.mark.parametrize("name", CALLS)
def test_dtypes_that_differ_raise_on_ranks_outside_the_mesh_too(name):
    x, y, index = torch.ones(2, 2), torch.ones(2, 2, dtype=torch.float64), torch.tensor([0, 1])
    with pytest.raises(RuntimeError):
        CALLS[name](x.clone(), y, index)

    def body(rank):
        mesh = T.Mesh((1,), ranks=(0,))
        given = [T.distribute_tensor(it.clone(), mesh, [T.Replicate()]) for it in (x, y, index)]
        with pytest.raises(T.PropagationError, match=r"takes .* and .* of one dtype, got .*; convert them .*x\.to\("):
            CALLS[name](*given)

    run_ranks(2, body)
