"""Plain and distributed tensors in one operator: the cure is that of the cause."""

from typing import Any

import pytest
import torch
import torch.distributed.tensor.parallel as torch_parallel
from torch.nn.functional import cross_entropy

import tritondt as T
from tritondt.comm.transports.threads import run_ranks
from tritondt.parallel import ColwiseParallel, PrepareModuleInput, loss_parallel, parallelize_module


def _in_torchs_loss_parallel(mesh: T.Mesh) -> Any:
    scores = T.distribute_tensor(torch.randn(4, 8), mesh, [T.Shard(1)])
    refused: Exception | None = None
    with torch_parallel.loss_parallel():  # which does not end where an exception leaves it
        try:
            cross_entropy(scores, torch.zeros(4, dtype=torch.long))
        except T.MixedTensorsError as error:
            refused = error
    assert refused is not None
    raise refused


def test_within_torchs_loss_parallel_the_sentence_names_ours() -> None:
    """One rank: torch's context is of the process, which rank threads share."""

    def body(rank: int) -> None:
        with pytest.raises(
            T.MixedTensorsError, match=r"torch's loss_parallel\(\) knows.*: enter tritondt\.parallel\.loss"
        ):
            _in_torchs_loss_parallel(T.Mesh((1,)))

    run_ranks(1, body)


def _with_a_plain_module(mesh: T.Mesh) -> Any:
    style = PrepareModuleInput(input_layouts=T.Replicate(), desired_input_layouts=T.Replicate())
    return parallelize_module(torch.nn.Linear(4, 4), mesh, style)(torch.ones(2, 4))


def _with_a_plain_state(mesh: T.Mesh) -> Any:
    parameter = torch.nn.Parameter(T.ones(4, device_mesh=mesh, placements=[T.Shard(0)]))
    optimizer = torch.optim.SGD([parameter], momentum=0.9, foreach=False)
    parameter.grad = parameter.detach().clone()
    optimizer.state[parameter]["momentum_buffer"] = torch.zeros(4)
    optimizer.step()


def _as_one_vector(mesh: T.Mesh) -> Any:
    distributed = T.ones(4, device_mesh=mesh, placements=[T.Shard(0)])
    return torch.nn.utils.parameters_to_vector([distributed, torch.ones(2)])


def _added(mesh: T.Mesh) -> Any:
    return T.ones(4, device_mesh=mesh, placements=[T.Shard(0)]) + torch.ones(4)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (_with_a_plain_module, r"a plain parameter of shape \(4,\); the parameter's module was left plain: give it a"),
        (_with_a_plain_state, r"the optimizer's state is plain.*set_optimizer_state_dict"),
        (_as_one_vector, r"call it within tritondt\.implicit_replication\(\) where plain parameters are alike"),
        (_added, r"make the plain one distributed with distribute_tensor\(x, mesh, placements\)"),
    ],
)
def test_the_sentence_names_the_cure_of_its_cause(call: Any, sentence: str) -> None:
    def body(rank: int) -> None:
        with pytest.raises(T.MixedTensorsError, match=sentence):
            call(T.Mesh((2,)))

    run_ranks(2, body)


def test_our_loss_parallel_does_what_the_sentence_promises() -> None:
    scores, labels = torch.randn(4, 8), torch.tensor([1, 0, 7, 5])

    def body(rank: int) -> torch.Tensor:
        with loss_parallel():
            loss = cross_entropy(T.distribute_tensor(scores, T.Mesh((2,)), [T.Shard(1)]), labels)
        return loss.full_tensor()  # type: ignore[attr-defined,no-any-return]

    for loss in run_ranks(2, body):
        torch.testing.assert_close(loss, cross_entropy(scores, labels))


@pytest.mark.filterwarnings("ignore")
def test_a_trace_of_torchscript_is_refused_by_name() -> None:
    def body(rank: int) -> None:
        model = parallelize_module(torch.nn.Linear(4, 4), T.Mesh((2,)), ColwiseParallel())
        with pytest.raises(
            T.LocalTensorError, match=r"torch\.jit\.trace was given.*compile the program by torch\.compile"
        ):
            torch.jit.trace(model, (torch.ones(2, 4),))

    run_ranks(2, body)
