"""Collectives over NCCL that were asked for before are one call of the extension; on the double of NCCL.

Each is right, watched and recorded as one that goes by Python, and what tells calls apart is looked at every time.
"""

import inspect
import sys
import weakref
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.overrides import TorchFunctionMode

from tests.harness.gloo_ranks import GlooRanks
from tritondt.comm import world
from tritondt.debug.tracing.recording import Recording
from tritondt.errors import LocalTensorError, PeerError, WorldError
from tritondt.process_group.collectives import TritondtProcessGroup

RanksOf = Callable[[str, int], GlooRanks]


@pytest.fixture
def ranks(ranks_of: RanksOf) -> GlooRanks:
    return ranks_of("nccl", 2)


def goes_by_python(call: Callable[[], object]) -> bool:
    """Whether a call enters the choice of what carries it, which is Python's."""
    entered = list[str]()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.endswith("router.py"):
            entered.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return "run" in entered


def each_kind(rank: int) -> dict[str, tuple[Callable[[], object], Callable[[], torch.Tensor], torch.Tensor]]:
    """A call of each kind, what it writes, and what is to be there; inputs are made anew by each call."""
    mine, both = torch.arange(3.0) + 10 * rank, torch.stack([torch.arange(3.0), torch.arange(3.0) + 10])
    whole = torch.arange(6.0) + 100 * rank
    x, out, wide = torch.empty(3), torch.empty(3), torch.empty(6)
    parts, pieces = [torch.empty(3), torch.empty(3)], [torch.empty(3), torch.empty(3)]
    exchanged = torch.cat([torch.arange(6.0)[3 * rank :][:3] + 100 * source for source in range(2)])
    theirs = [torch.empty(rank + 1), torch.empty(rank + 1)]
    given = [torch.full((1 + other,), float(10 * rank + other)) for other in range(2)]
    uneven = torch.cat([torch.full((rank + 1,), float(10 * source + rank)) for source in range(2)])
    roots = torch.empty(6)

    def on(run: Callable[[torch.Tensor], object]) -> Callable[[], object]:
        return lambda: run(x.copy_(mine))

    return {
        "all_reduce": (on(dist.all_reduce), lambda: x, both.sum(0)),
        "max": (on(lambda x: dist.all_reduce(x, dist.ReduceOp.MAX)), lambda: x, both[1]),
        "broadcast": (on(lambda x: dist.broadcast(x, 1)), lambda: x, both[1]),
        "reduce": (on(lambda x: dist.reduce(x, 0)), lambda: x if rank == 0 else out.copy_(both.sum(0)), both.sum(0)),
        "all_gather": (lambda: dist.all_gather(list(wide.view(2, 3).unbind()), mine), lambda: wide, both.flatten()),
        "all_gather_into_tensor": (lambda: dist.all_gather_into_tensor(wide, mine), lambda: wide, both.flatten()),
        "reduce_scatter_tensor": (
            lambda: dist.reduce_scatter_tensor(out, whole),
            lambda: out,
            (2 * torch.arange(6.0) + 100)[3 * rank :][:3],
        ),
        "reduce_scatter": (
            lambda: dist.reduce_scatter(out, list(whole.view(2, 3).unbind())),
            lambda: out,
            (2 * torch.arange(6.0) + 100)[3 * rank :][:3],
        ),
        "all_to_all_single": (lambda: dist.all_to_all_single(wide, whole), lambda: wide, exchanged),
        "all_to_all": (lambda: dist.all_to_all(theirs, given), lambda: torch.cat(theirs), uneven),
        "gather": (
            lambda: dist.gather(mine, parts if rank == 0 else None, dst=0),
            lambda: torch.cat(parts) if rank == 0 else roots.copy_(both.flatten()),
            both.flatten(),
        ),
        "scatter": (
            lambda: (
                dist.scatter(out, [each.copy_(row) for each, row in zip(pieces, both, strict=True)], src=0)
                if rank == 0
                else dist.scatter(out, src=0)
            ),
            lambda: out,
            both[rank],
        ),
    }


def run_each_kind(rank: int) -> list[str]:
    """The kinds that go by Python still when they are asked for a fourth time."""
    found = []
    for name, (call, written, expected) in each_kind(rank).items():
        is_by_python = True
        for _ in range(4):
            written().zero_()
            is_by_python = goes_by_python(call)
            assert torch.equal(written(), expected), name
        if is_by_python:
            found.append(name)
    return found


def test_a_kind_goes_by_one_call_when_it_was_asked_for_before(ranks: GlooRanks) -> None:
    assert ranks.run(run_each_kind) == [[], []]


def others(rank: int) -> None:
    """Tensors that only fields tell from one that is kept."""
    group: Any = dist.group.WORLD
    kept = torch.full((4,), 1.0 + rank)
    for _ in range(3):
        dist.all_reduce(kept.clone())
    alike: list[torch.Tensor] = [
        kept.double(),
        kept.to(torch.int32),
        torch.full((8,), 1.0 + rank)[::2],
        torch.stack([kept, kept]).T,
        torch.view_as_complex(torch.full((2, 2), 1.0 + rank)),
        torch.full((5,), 1.0 + rank),
        torch.nn.Parameter(kept.clone(), requires_grad=False),
        torch.full((4, 1, 1), 1.0 + rank),
    ]
    for x in alike:
        ours = x.detach().clone(memory_format=torch.preserve_format)
        if not x.is_contiguous() and x.dim() == 1:
            with pytest.raises(ValueError, match="contiguous"):
                group.allreduce([x]).wait()
            continue
        group.allreduce([ours]).wait()
        assert torch.equal(ours, torch.full_like(ours, 3 + 3j if ours.is_complex() else 3)), x
    with pytest.raises(ValueError, match="clone"):
        group.allreduce([torch._neg_view(kept.clone())])
    dist.all_reduce(kept)
    assert torch.equal(kept, torch.full((4,), 3.0))


def test_tensors_that_differ_by_a_field_are_told_apart(ranks: GlooRanks) -> None:
    ranks.run(others)


class During(TorchFunctionMode):
    """Runs `then` when a function of torch of this name is called: what a thread may do to a call that is under way."""

    def __init__(self, name: str, then: Callable[[], object]) -> None:
        super().__init__()
        self._name, self._then, self.has_run = name, then, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ == self._name and not self.has_run:
            self.has_run = True
            self._then()
        return func(*args, **(kwargs or {}))


def change_lists(rank: int) -> None:
    group: Any = dist.group.WORLD
    for _ in range(3):
        dist.all_reduce_coalesced([torch.ones(3), torch.ones(4)])
    given = [torch.ones(3), torch.ones(4)]
    with During("is_neg", given.clear), pytest.raises(WorldError, match="no tensors"):
        group.allreduce_coalesced(given, c10d.AllreduceCoalescedOptions())

    mine, expected = torch.arange(11.0) + 100 * rank, torch.stack([torch.arange(11.0), torch.arange(11.0) + 100])
    whole, apart = torch.empty(2, 11), [torch.empty(11), torch.empty(11)]
    for _ in range(3):
        dist.all_gather(list(whole.zero_().unbind()), mine)
        assert torch.equal(whole, expected)
    outputs = [*apart]
    during = During("_foreach_copy_", lambda: outputs.__setitem__(slice(None), whole.unbind()))
    with during:  # the operation that is made is that of tensors apart
        group.allgather([outputs], [mine], c10d.AllgatherOptions()).wait()
    assert during.has_run
    for _ in range(3):
        assert torch.equal(torch.stack(apart), expected)
        for each in apart:
            each.zero_()
        dist.all_gather([*apart], mine)


def test_lists_may_change_under_a_call(ranks: GlooRanks) -> None:
    ranks.run(change_lists)


def give_long_rows(rank: int) -> None:
    group: Any = dist.new_group(backend="tritondt")
    options = c10d.AllToAllOptions()
    for _ in range(3):
        group.alltoall_base(torch.empty(4), torch.ones(4), [2, 2], [2, 2], options).wait()
    kind, text = (LocalTensorError, f"split sizes .{2**70}, 2.") if rank == 1 else (PeerError, "rank 1")
    with pytest.raises(kind, match=text):
        group.alltoall_base(torch.empty(4), torch.ones(4), [2, 2], [2**70 if rank else 2, 2], options).wait(
            timedelta(seconds=100)
        )
    dist.barrier()
    group.abort()


def test_rows_of_more_than_64_bits_are_refused_as_others(ranks: GlooRanks) -> None:
    ranks.run(give_long_rows)


def records(rank: int) -> None:
    recorder = world.current().flight.recorder
    group: Any = dist.group.WORLD
    x = torch.full((9,), 1.0 + rank)
    lines = []
    for _ in range(4):
        counted = group._get_sequence_number_for_group()
        dist.all_reduce(x)
        lines.append(inspect.currentframe().f_lineno - 1)  # type: ignore[union-attr]
        assert group._get_sequence_number_for_group() == counted + 1
    entries = [entry for entry in recorder.last(20) if entry["operation"] == "all_reduce (sum) of 9 float32"]
    assert len(entries) == 4
    sequences = [entry["sequence"] for entry in entries]
    assert sequences == list(range(sequences[0], sequences[0] + 4))
    assert len({entry["communicator"] for entry in entries}) == len({entry["fingerprint"] for entry in entries}) == 1
    assert all(f"test_by_one_call.py:{lines[0]} (records)" in entry["site"] for entry in entries)


def test_it_is_counted_and_recorded_with_its_line(ranks: GlooRanks) -> None:
    ranks.run(records)


def works(rank: int) -> None:
    x = torch.full((6,), 1.0 + rank)
    for _ in range(3):
        work: Any = dist.all_reduce(x.fill_(1.0 + rank), async_op=True)
        assert work.wait() is True
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
        assert work.result()[0] is x
        assert work.source_rank() == -1
        assert isinstance(work, c10d.Work)
        assert work.wait(timedelta(seconds=60)) is True
        future = work.get_future()
        future.wait()
        assert future.value()[0] is x
        assert torch.equal(x, torch.full((6,), 3.0))
    given = torch.full((3,), 1.0 + rank)
    seen, wide = weakref.ref(given), torch.empty(6)
    work = dist.all_gather_into_tensor(wide, given, async_op=True)
    del given
    work.wait()
    assert seen() is None  # it is held until the issuer's stream comes after it, and no longer
    assert torch.equal(wide, torch.tensor([1.0] * 3 + [2.0] * 3))


def test_its_work_is_as_any_other(ranks: GlooRanks) -> None:
    ranks.run(works)


def coalesce(rank: int) -> None:
    x, y = torch.full((3,), 1.0 + rank), torch.full((3,), 10.0 + rank)
    for _ in range(3):
        dist.all_reduce(x.fill_(1.0 + rank))
    with dist._coalescing_manager(device=torch.device("cpu")):
        dist.all_reduce(x.fill_(1.0 + rank))
        dist.all_reduce(y)
    group: Any = dist.group.WORLD
    group._start_coalescing(torch.device("cpu"))
    assert group.allreduce([x]) is None
    group._end_coalescing(torch.device("cpu")).wait()
    assert torch.equal(x, torch.full((3,), 6.0))
    assert torch.equal(y, torch.full((3,), 21.0))


def test_what_is_coalesced_is_held_back(ranks: GlooRanks) -> None:
    ranks.run(coalesce)


def end(rank: int) -> None:
    group: Any = dist.new_group(backend="tritondt")
    x = torch.full((3,), 1.0 + rank)
    for _ in range(3):
        dist.all_reduce(x.fill_(1.0 + rank), group=group)
    dist.barrier(group)
    group.abort()
    with pytest.raises(WorldError, match="ended"):
        dist.all_reduce(x, group=group)


def test_an_ended_group_says_so(ranks: GlooRanks) -> None:
    ranks.run(end)


def end_while_it_opens(rank: int) -> None:
    group: Any = dist.new_group(backend="tritondt")
    x = torch.full((3,), 1.0 + rank)
    dist.all_reduce(x, group=group)
    group._calls.close()
    during = During("empty", group.abort)
    with during:
        group.allreduce([x], c10d.AllreduceOptions())
    assert during.has_run
    assert not group._calls.is_open
    with pytest.raises(WorldError, match="ended"):
        dist.all_reduce(x, group=group)
    dist.barrier()


def test_a_group_that_ends_while_calls_are_taken_takes_none(ranks: GlooRanks) -> None:
    ranks.run(end_while_it_opens)


def watched(rank: int) -> tuple[set[str], set[str], list[bool]]:
    """Kinds of spans of a recording, ranges of the profiler, and the ways that the call takes with them and without."""
    x = torch.full((7,), 1.0 + rank)
    for _ in range(3):
        dist.all_reduce(x)

    def ask() -> None:
        dist.all_reduce(x, async_op=True).wait()

    ways, recording = [goes_by_python(ask)], Recording()
    recording.begin()
    try:
        ways.append(goes_by_python(ask))
    finally:
        recording.end()
    with torch.profiler.profile() as profile:
        ways.append(goes_by_python(ask))
    ways.append(goes_by_python(ask))
    spans = {span.kind for span in recording.record(rank, 2).spans}
    return spans, {event.key for event in profile.key_averages()}, ways


def test_recordings_and_profiles_see_it(ranks: GlooRanks) -> None:
    for spans, ranges, ways in ranks.run(watched):
        assert spans >= {"collective", "wait"}
        assert "tritondt::allreduce" in ranges
        assert ways == [False, True, True, False]


def test_methods_are_documented_and_called_by_name() -> None:
    method: Any = TritondtProcessGroup.allreduce
    assert method.__name__ == "allreduce"
    assert "reduced" in method.__doc__
    assert list(inspect.signature(method).parameters) == ["self", "tensors", "opts"]
