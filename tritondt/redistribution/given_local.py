"""Local tensors as callers give them: tensors of one rank's memory, once they have arrived."""

import torch

from tritondt.errors import LocalTensorError, MixedTensorsError, check_not_of_torch
from tritondt.sharding.spec import check_strided


def given_local(local: torch.Tensor, taker: str) -> torch.Tensor:
    """The local tensor that `taker` was given; a result of torch's functional collectives once it has arrived.

    MixedTensorsError for a distributed tensor, of this library or of torch: parts of parts would have no layout.
    LocalTensorError for what is no tensor, TransportError for nested and sparse ones.
    """
    kind = type(local)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        if local.is_nested or local.layout is not torch.strided:
            check_strided(taker, local)
        return local
    if not isinstance(local, torch.Tensor):
        raise LocalTensorError(f"{taker} got a {kind.__name__}; allowed is a torch.Tensor: torch.tensor(...) makes one")
    check_not_of_torch(local, taker)
    # Known by names of classes: tensors of this library are above this module, and torch's are not imported to ask.
    for base in kind.__mro__:
        if base.__name__ == "DTensor" and base.__module__.startswith("tritondt."):
            raise MixedTensorsError(
                f"{taker} got {local._spec}, a distributed tensor, for a local one; give it x.to_local(), or call "  # type: ignore[attr-defined]
                "x.redistribute(...) to lay x out otherwise"
            )
        if base.__name__ == "AsyncCollectiveTensor" and base.__module__.startswith("torch.distributed."):
            arrived: torch.Tensor = local.wait()  # type: ignore[attr-defined]
            return arrived
    check_strided(taker, local)
    return local
