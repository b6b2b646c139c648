"""loss_parallel: the scope in which a loss of class-sharded logits takes plain targets."""

from contextlib import AbstractContextManager

from tritondt.ops.propagation.replication import implicit_replication


def loss_parallel() -> AbstractContextManager[None]:
    """Context in which cross_entropy of logits cut along their classes takes plain targets and weights.

    Plain tensors beside distributed ones count as alike on every rank, as in `tritondt.implicit_replication()`. Outside
    of the context, too, logits stay cut in forward and backward, ranks exchange a few numbers for each row, and the
    loss is whole on every rank of the axis that cuts the classes. Distributed targets need no context, and backward may
    be called outside of it. Source: torch.distributed.tensor.parallel.loss_parallel.

    >>> import torch, tritondt as T
    >>> from tritondt.comm.transports.threads import run_ranks
    >>> def loss_on(rank):
    ...     logits = T.zeros(2, 4, device_mesh=T.Mesh((2,)), placements=[T.Shard(1)]).requires_grad_()
    ...     with loss_parallel():
    ...         loss = torch.nn.functional.cross_entropy(logits, torch.tensor([0, 3]))
    ...         loss.backward()
    ...     return logits.grad.placements, round(loss.item(), 4)
    >>> run_ranks(2, loss_on)[0]
    ((S1,), 1.3863)
    """
    return implicit_replication()
