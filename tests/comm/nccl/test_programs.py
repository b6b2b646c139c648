"""Exchanges over NCCL as programs of the extension, on the double: on tensors like those of the program, and others."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tritondt as T
from tests.harness.gloo_ranks import GlooRanks
from tests.harness.nccl_on_host import ranks_on
from tritondt.comm import world
from tritondt.comm.nccl.programs import StreamProgram
from tritondt.comm.transports.nccl import NcclCommunicator
from tritondt.redistribution.compile import compile_plan

LENGTHS = (6, 10)


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[GlooRanks]:
    with ranks_on("nccl", 2, TRITONDT_TIMEOUT="60") as ranks:
        yield ranks


@pytest.fixture
def failing_ranks() -> Iterator[GlooRanks]:
    with ranks_on("nccl", 2, TRITONDT_TIMEOUT="60") as ranks:
        yield ranks


class Exchange:
    """A step of a redistribution of LENGTHS from rows to columns, to be run on any tensors."""

    def __init__(self, rank: int) -> None:
        mesh, self.rank = T.Mesh((2,)), rank
        rows = T.distribute_tensor(torch.zeros(LENGTHS), mesh, [T.Shard(0)])
        columns = T.distribute_tensor(torch.zeros(LENGTHS), mesh, [T.Shard(1)])
        step = compile_plan(rows._spec, columns._spec, (10, 1), torch.device("cpu"), None).steps[0]
        assert step.transfer is not None
        self.transfer = step.transfer
        communicator: Any = step.communicator
        self.communicator: NcclCommunicator = communicator

    @property
    def program(self) -> StreamProgram | None:
        """The program of the exchange, where it has one."""
        found: StreamProgram | None = self.transfer.compiled.get(self.communicator._programs)
        return found

    def run(self, seed: int, target: torch.Tensor | None = None, into: Any = torch.clone) -> None:
        """Moves other values each time, and compares; `into` makes the source of the rows."""
        whole = torch.randn(LENGTHS, generator=torch.Generator().manual_seed(seed))
        target = torch.empty(6, 5) if target is None else target
        self.communicator.exchange([into(whole[3 * self.rank :][:3])], [target], self.transfer)
        self.communicator.drain()
        stream: Any = self.communicator._streams
        stream.synchronize()
        torch.testing.assert_close(target, whole[:, 5 * self.rank :][:, :5], rtol=0, atol=0)


class Named(torch.Tensor):
    """A tensor of another class."""


def moved_from(num_bytes: int) -> Any:
    """A function that copies a tensor to memory that starts so many bytes behind a multiple of 16."""

    def into(rows: torch.Tensor) -> torch.Tensor:
        memory = torch.empty(4 * rows.numel() + 64, dtype=torch.uint8)
        start = -memory.data_ptr() % 16 + num_bytes
        return memory[start : start + 4 * rows.numel()].view(torch.float32).view(rows.shape).copy_(rows)

    return into


def run_again(rank: int) -> tuple[bool, int, list[str]]:
    exchange = Exchange(rank)
    exchange.run(1)
    first = exchange.program
    assert first is not None
    for seed in range(2, 5):
        exchange.run(seed)
    same = exchange.program is first
    recorder = world.current().flight.recorder
    exchange.communicator._engine.reap()
    entries = [each for each in recorder.entries() if each["operation"] == exchange.transfer.description]
    assert [each["sent_bytes"] for each in entries[-3:]] == [3 * 5 * 4] * 3
    return same, exchange.communicator.traffic.num_sent, [each["state"] for each in entries[-3:]]


def test_a_program_runs_again_on_tensors_alike(two_ranks: GlooRanks) -> None:
    for same, num_sent, states in two_ranks.run(run_again):
        assert same
        assert num_sent >= 4
        assert states == ["done"] * 3


def run_on_others(rank: int) -> None:
    exchange = Exchange(rank)
    exchange.run(1)
    for seed, into in enumerate(
        (
            moved_from(4),  # misaligned, on one rank or on both
            moved_from(0) if rank else moved_from(4),
            torch.clone,
            lambda rows: torch.nn.Parameter(rows.clone(), requires_grad=False),
            lambda rows: rows.clone().as_subclass(Named),
            torch.clone,
        ),
        2,
    ):
        exchange.run(seed, into=into)
        exchange.run(seed + 10, into=into)
    exchange.run(30, target=torch.empty(7, 5)[1:] if rank else torch.empty(6, 5))


def test_other_tensors_are_told_by_their_fields(two_ranks: GlooRanks) -> None:
    """Misaligned ones go part by part, without a copy too many; those alike have a program again."""
    two_ranks.run(run_on_others)


def give_another(rank: int, what: str) -> str:
    exchange = Exchange(rank)
    exchange.run(1)
    exchange.run(2)
    source = {
        "dtype": lambda: torch.zeros(3, 10, dtype=torch.float64),
        "small": lambda: torch.zeros(3, 4),
        "freed": lambda: torch.zeros(3, 10),
    }[what]()
    if what == "freed":
        source.untyped_storage().resize_(0)
    with pytest.raises(T.TritondtError) as told:
        exchange.communicator.exchange([source], [torch.empty(6, 5)], exchange.transfer)
    exchange.run(3)
    return str(told.value)


@pytest.mark.parametrize(
    ("what", "found"),
    [("dtype", "torch.float64 with 30"), ("small", "torch.float32 with 12"), ("freed", "torch.float32 with 0")],
)
def test_a_tensor_that_a_program_is_not_for_is_refused(two_ranks: GlooRanks, what: str, found: str) -> None:
    for told in two_ranks.run(give_another, what):
        assert (
            f"was compiled for a source of torch.float32 with 30 elements in memory, and given one of {found}" in told
        )


def use_ended(rank: int) -> list[str]:
    exchange, told = Exchange(rank), []
    exchange.run(1)
    native = exchange.program
    assert native is not None
    T.close()
    tensors, memory = ([torch.zeros(3, 10)], [torch.zeros(6, 5)]), torch.zeros(256)
    with pytest.raises(T.WorldError) as error:
        exchange.communicator.exchange(*tensors, exchange.transfer)
    told.append(str(error.value))
    with pytest.raises(RuntimeError) as gone:  # the extension too, whoever asks
        native.native.issue(*tensors, memory.data_ptr(), 9, -1, 60.0, 1)
    told.append(type(gone.value).__name__)
    return told


def give_resized(rank: int) -> None:
    """As many elements in memory, of another shape: that is compiled for anew, and moves what lies there."""
    exchange = Exchange(rank)
    exchange.run(1)
    first = exchange.program
    exchange.run(2, into=lambda rows: rows.clone().resize_(30))
    assert exchange.program is not first
    exchange.run(3)


def test_a_resized_tensor_is_compiled_for_anew(two_ranks: GlooRanks) -> None:
    two_ranks.run(give_resized)


def test_a_program_of_a_communicator_that_has_ended_is_refused(failing_ranks: GlooRanks) -> None:
    for closed, kind in failing_ranks.run(use_ended):
        assert "closed" in closed
        assert kind == "NcclError"


def run_within_itself(rank: int) -> str:
    exchange = Exchange(rank)
    exchange.run(1)
    program = exchange.program
    assert program is not None
    tensors, memory, told = ([torch.zeros(3, 10)], [torch.zeros(6, 5)]), torch.zeros(256), []

    def issue(*_: object) -> None:
        with pytest.raises(RuntimeError) as error:
            program.native.issue(*tensors, memory.data_ptr(), 9, -1, 60.0, 1)
        told.append(str(error.value))

    program.native.set_launches([(issue, "s", "p")], [], True, False, 0)
    exchange.communicator.exchange(*tensors, exchange.transfer)
    return "".join(told)


def test_two_threads_do_not_run_one_program_at_once(failing_ranks: GlooRanks) -> None:
    """The second comes while the first packs, as another thread would."""
    expected = "two threads run one program at once; a communicator takes one"
    assert failing_ranks.run(run_within_itself) == [expected] * 2


def break_off(rank: int) -> tuple[str, str]:
    exchange = Exchange(rank)
    exchange.run(1)
    program = exchange.program
    assert program is not None
    if rank == 0:

        def fail(*_: object) -> None:
            raise MemoryError("no room for a launch")

        program.native.set_launches([(fail, "s", "p")], [], True, False, 0)
    target = torch.empty(6, 5)

    def go_on() -> None:
        for _ in range(600):  # the other rank hears of it while it goes on
            exchange.communicator.exchange([torch.zeros(3, 10)], [target], exchange.transfer)
            time.sleep(0.1)

    with pytest.raises((MemoryError, T.PeerError)) as told:
        go_on()
    recorder = world.current().flight.recorder
    failed = [each["state"] for each in recorder.entries() if each["operation"] == exchange.transfer.description]
    return type(told.value).__name__, failed[-1]


def test_half_of_a_program_in_the_stream_ends_everything(failing_ranks: GlooRanks) -> None:
    first, second = failing_ranks.run(break_off)
    assert first == ("MemoryError", "failed")
    assert second[0] == "PeerError"
