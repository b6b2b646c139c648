"""What holds for tensors on a GPU."""

import pytest
import torch

import tritondt as T
from tritondt.comm.threads import run_ranks


@pytest.mark.gpu
def test_a_transport_for_the_cpu_refuses_cuda_tensors():
    def body(rank):
        mesh = T.Mesh((2,), device_type="cuda")
        meta = T.TensorMeta.contiguous((5, 3))
        rows, whole = (T.DTensorSpec(mesh, T.parse_placements(text), meta) for text in ("S0", "R"))
        with pytest.raises(T.TransportError, match=r"tensor on cuda:0; it carries tensors on cpu only"):
            T.redistribute(torch.zeros(rows.local_shape, device="cuda"), rows, whole)

    run_ranks(2, body)
