"""Bindings refuse wrong arguments, closed objects and objects without `__init__`, and never read outside.

Each call runs in a child of its own: one that reads outside would end the process by a signal.
"""

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch

from tests.harness.fork_server import REPOSITORY

_C: Any = importlib.import_module("tritondt._C")  # of any type: what is given to it is wrong
MEMORY = torch.zeros(4096, dtype=torch.uint8)
ADDRESS = MEMORY.data_ptr()
CLASSES = [found for found in vars(_C).values() if isinstance(found, type) and not issubclass(found, Exception)]
Wrong = Callable[[], Any]
Span = tuple[int, int, int]
HERE: Span = (0, 0, 8)


def used_without_init(kind: Any) -> Wrong:
    """Looks at every property, and calls every method that takes no arguments."""

    def use() -> None:
        made = kind.__new__(kind)
        for name in dir(made):
            if name.startswith("_") or isinstance(vars(kind).get(name), staticmethod):
                continue
            try:
                found = getattr(made, name)
                if callable(found):
                    found()
            except (TypeError, RuntimeError):
                continue
            raise AssertionError(f"{kind.__name__}.{name} works without __init__")
        raise TypeError("all is refused")

    return use


def started(peer: int, num_bytes: int, is_received: bool) -> Wrong:
    def start() -> None:
        group, messages = _C.SocketGroup([-1, -1]), [(peer, ADDRESS, num_bytes)]
        group.start([] if is_received else messages, messages if is_received else [], 1)

    return start


def sliced(peer: int, tensor: int | None, num_bytes: int) -> Wrong:
    def start() -> None:
        slices, none = _C.MessageSlices([(peer, tensor, 0, num_bytes)]), _C.MessageSlices([])
        _C.SocketGroup([-1, -1]).start_slices(slices, [ADDRESS], ADDRESS, none, [], 0, 1)

    return start


def group_of(**other: Any) -> Any:
    given: dict[str, Any] = {
        "place": 0,
        "arenas": [_C.Arena(1 << 16)],
        "group": _C.SocketGroup([-1]),
        "sockets": [-1],
        "num_spins": 0,
    }
    return _C.ArenaGroup(**(given | other))


def run(program: Any, group: Any = None) -> Any:
    found = group or group_of()
    found.set_timeout(1)
    return found.run(program, [ADDRESS], [ADDRESS], 1, 1, 1, ADDRESS)


def moves(**other: Any) -> Wrong:
    given: dict[str, Any] = {"chunk_bytes": 64, "sends": [], "receives": [], "keeps": [], "is_past_cache": False}
    return lambda: run(_C.ByteMoves(**(given | other)))


def reducer(**other: Any) -> Any:
    given: dict[str, Any] = {
        "dtype": "float32",
        "op": "sum",
        "divisor": 1,
        "places": [0],
        "own": 0,
        "chunk_bytes": 64,
    }
    return _C.Reducer(**(given | other))


def one_shot(source: Span = HERE, target: Span = HERE, **other: Any) -> Wrong:
    return lambda: run(_C.OneShotReduction(reducer(**other), source=source, target=target, root=-1))


def piecewise(pieces: list[Span], results: list[Span], **other: Any) -> Wrong:
    return lambda: run(_C.PiecewiseReduction(reducer(**other), pieces=pieces, results=results, is_past_cache=False))


# Two elements of a part, in a tensor and in a message.
IN_ORDER: Any = ([2], [(0, [1]), (0, [1])])
TWO: Any = (0, [2], [IN_ORDER])


def boxes(**other: Any) -> Any:
    given: dict[str, Any] = {
        "num_ranks": 1,
        "chunk_bytes": 64,
        "itemsizes": [4],
        "reductions": [None],
        "leaving": [],
        "arriving": [],
        "sends": [],
        "receives": [],
        "own_terms": [],
        "keeps": [],
        "is_past_cache": False,
    }
    return _C.BoxMoves(**(given | other))


def planned(**other: Any) -> Wrong:
    return lambda: run(boxes(**other))


def copies(source: int, target: int) -> Any:
    return _C.CopyTable([(source, target, 0, 0, 4, [2], [4], [4])])


def released() -> Any:
    group = group_of()
    group.release()
    return group


def released_under_way() -> None:
    group = group_of()
    assert run(waiting(), group)[0] == "pending"
    group.release()
    group.finish()


def waiting() -> Any:
    return boxes(arriving=[TWO], receives=[(0, [(0, 0)])])


def arena_of_released() -> None:
    arena = _C.Arena(1 << 16)
    group_of(arenas=[arena]).release()
    group_of(arenas=[arena])


REFUSED = tuple(
    f"{kind}: "
    for kind in (
        "ValueError",
        "TypeError",
        "IndexError",
        "OverflowError",
        "RuntimeError",
        "AttributeError",
        "NcclError",
        "OSError",
    )
)
WRONG: dict[str, Wrong] = {
    **{f"{kind.__name__} without __init__": used_without_init(kind) for kind in CLASSES if not hasattr(kind, "name")},
    **{
        f"SocketGroup.start({peer}, {num_bytes}), received: {is_received}": started(peer, num_bytes, is_received)
        for peer, num_bytes in ((2, 8), (10**6, 8), (2**63 - 1, 8), (-1, 8), (-(2**63), 8), (0, -1), (0, -(2**63)))
        for is_received in (False, True)
    },
    "SocketGroup.start_slices, peer": sliced(2, 0, 8),
    "SocketGroup.start_slices, tensor": sliced(0, 5, 8),
    "SocketGroup.start_slices, bytes": sliced(0, None, -8),
    "SocketGroup.connect": lambda: _C.SocketGroup([-1]).connect(1, -1),
    "TimedExchange.set_timeout": lambda: _C.SocketGroup([-1]).set_timeout(-1.0),
    "TimedExchange.set_timeout, no number": lambda: _C.SocketGroup([-1]).set_timeout(float("nan")),
    "Watchdog.watch": lambda: _C.Watchdog().watch(None, 1.0, None, ""),
    "Arena of no bytes": lambda: _C.Arena(0),
    "Arena of too many bytes": lambda: _C.Arena(2**63),
    "Arena of another file": lambda: _C.Arena("/dev/null", 4096),
    "ArenaGroup, no arena": lambda: group_of(arenas=[None]),
    "ArenaGroup, place": lambda: group_of(place=1),
    "ArenaGroup, sockets": lambda: group_of(sockets=[-1, -1]),
    "ArenaGroup, short arenas": lambda: group_of(arenas=[_C.Arena(64)]),
    "ArenaGroup, an arena that is released": arena_of_released,
    "ArenaGroup.connect": lambda: group_of().connect(9, -1),
    "ArenaGroup.run, no plan": lambda: run(None),
    "ArenaGroup.run, released": lambda: run(boxes(), released()),
    "ArenaGroup.finish, released": lambda: released().finish(),
    "ArenaGroup.finish, released under way": released_under_way,
    "ByteMoves, kept in no target": moves(keeps=[(HERE, (5, 0, 8))]),
    "ByteMoves, kept of no source": moves(keeps=[((5, 0, 8), HERE)]),
    "ByteMoves, kept of other length": moves(keeps=[(HERE, (0, 0, 4))]),
    "ByteMoves, sent of no source": moves(sends=[(0, (3, 0, 8))]),
    "ByteMoves, sent to nobody": moves(sends=[(7, HERE)]),
    "ByteMoves, received in no target": moves(receives=[(0, (2**40, 0, 8))]),
    "ByteMoves, received of nobody": moves(receives=[(2**40, HERE)]),
    "ByteMoves, chunks": moves(chunk_bytes=0, sends=[(0, HERE)]),
    "ByteMoves, too many rounds": moves(sends=[(0, (0, 0, 2**63 - 1))]),
    "ByteMoves, longer than a slot": moves(chunk_bytes=1 << 20, sends=[(0, (0, 0, 1 << 20))]),
    "Reducer, dtype": lambda: reducer(dtype="quint8"),
    "Reducer, divisor": lambda: reducer(divisor=0),
    "OneShotReduction, source": one_shot(source=(7, 0, 8)),
    "OneShotReduction, target": one_shot(target=(7, 0, 8)),
    "OneShotReduction, lengths": one_shot(target=(0, 0, 4)),
    "OneShotReduction, own": one_shot(own=5),
    "OneShotReduction, places": one_shot(places=[0, 9], own=0),
    "PiecewiseReduction, pieces": piecewise([HERE, HERE], [HERE]),
    "PiecewiseReduction, piece": piecewise([(4, 0, 8)], [HERE]),
    "PiecewiseReduction, result": piecewise([HERE], [(4, 0, 8)]),
    "PiecewiseReduction, lengths": piecewise([HERE], [(0, 0, 4)]),
    "BoxMoves, chunks": planned(chunk_bytes=2),
    "BoxMoves, long chunks": planned(chunk_bytes=2**63),
    "BoxMoves, itemsizes": planned(itemsizes=[0]),
    "BoxMoves, tensors": planned(itemsizes=[4, 4], reductions=[None, None]),
    "BoxMoves, reductions": planned(reductions=[]),
    "BoxMoves, reduction": planned(
        reductions=[("float32", "mod", 1)], arriving=[TWO], receives=[(0, [(0, 0), (0, 1)])]
    ),
    "BoxMoves, tensor": planned(leaving=[(5, [2], [IN_ORDER])]),
    "BoxMoves, lengths": planned(leaving=[(0, [-2], [IN_ORDER])]),
    "BoxMoves, many lengths": planned(leaving=[(0, [2**40, 2**40], [])]),
    "BoxMoves, dims": planned(arriving=[(0, [2, 2], [IN_ORDER])]),
    "BoxMoves, storages": planned(arriving=[(0, [2], [([2], [(0, [1])])])]),
    "BoxMoves, strides": planned(arriving=[(0, [2], [([2], [(0, [1]), (0, [])])])]),
    "BoxMoves, no stride": planned(arriving=[(0, [2], [([2], [(0, [1]), (0, [0])])])]),
    "BoxMoves, long box": planned(arriving=[(0, [2], [([3], [(0, [1]), (0, [1])])])]),
    "BoxMoves, sent part": planned(sends=[(0, [1])]),
    "BoxMoves, received part": planned(receives=[(0, [(1, 0)])]),
    "BoxMoves, own part": planned(own_terms=[(1, 0)]),
    "BoxMoves, own part that moves": planned(arriving=[TWO], own_terms=[(0, 0)]),
    "BoxMoves, own part without its storage": planned(
        reductions=[("float32", "sum", 1)], arriving=[TWO], receives=[(0, [(0, 0)])], own_terms=[(0, 1)]
    ),
    "BoxMoves, receiver": planned(leaving=[TWO], sends=[(4, [0])]),
    "BoxMoves, sender": planned(arriving=[TWO], receives=[(4, [(0, 0)])]),
    "BoxMoves, keep": planned(keeps=[(0, 5, 0, 0, 4, [2], [1], [1])]),
    "BoxMoves, many rounds": planned(leaving=[(0, [2**25], [])], sends=[(0, [0])]),
    "BoxMoves, outside of the slot": planned(
        num_ranks=1, chunk_bytes=2**20, leaving=[(0, [2**16], [])], sends=[(0, [0])]
    ),
    "BoxMoves.observed": lambda: boxes(keeps=[(0, 0, 0, 0, 4, [2], [1], [1])]).observed("send", print),
    "BoxMoves.observed, no round": lambda: boxes().observed("keep", print),
    "CopyTable": lambda: copies(-1, 0),
    "CopyTable.run, pointers": lambda: copies(1, 0).run([ADDRESS], [ADDRESS], 1),
    "CopyTable.run, null": lambda: copies(0, 0).run([0], [ADDRESS], 1),
    "CopyTable.run, threads": lambda: copies(0, 0).run([ADDRESS], [ADDRESS], 0),
    "CopyTable.run, no number": lambda: copies(0, 0).run([-1], [ADDRESS], 1),
    "CastTable": lambda: _C.CastTable([(0, 3, 0, 0, [2], [4], [2])], "float32", "float16").run([ADDRESS], [ADDRESS], 1),
    "QuantizeTable": lambda: _C.QuantizeTable([(0, 0, 0, 0, [2], [4], [1])], "float32", "int4"),
    "ReduceTable": lambda: _C.ReduceTable([(0, 0, [2], [4], [])], "sum", "float32", 1),
    "FlightRecorder": lambda: _C.FlightRecorder(0, 1, -5),
    "FlightRecorder.state": lambda: _C.FlightRecorder(0, 1).state(0, 99),
    "FlightRecorder.step": lambda: _C.FlightRecorder(0, 1).step(0, 99),
    "FlightRecorder.leave": lambda: _C.FlightRecorder(0, 1).leave("0"),
    "StepTimes": lambda: _C.StepTimes(-1),
    "StepTimes.steps": lambda: _C.StepTimes(1).steps(),
    "FlightRecorder.begin": lambda: _C.FlightRecorder(0, 1).begin(2**40, 0, 0, 0, 0),
    "FlightRecorder.label_text": lambda: _C.FlightRecorder(0, 1).label_text(10**6),
    "NcclLibrary": lambda: _C.NcclLibrary("/nowhere/libnccl.so.2", None),
    "NcclCalls": lambda: _C.NcclCalls(None, []),
    "write_random_words": lambda: _C.write_random_words([[(0, 2)]], [2], 1, 7, ADDRESS, 1),
    "make_call_splitter": lambda: _C.make_call_splitter(int),
}


def outlive_its_plan() -> None:
    """A plan and its tables live as long as an exchange by them is under way, and no longer."""
    group = group_of()
    group.set_timeout(30)
    seen: list[None] = []
    plan = waiting().observed("unpack", lambda: seen.append(None))
    assert group.run(plan, [ADDRESS], [ADDRESS], 1, 1, 1, ADDRESS)[0] == "pending"
    before = sys.getrefcount(plan)
    del plan
    assert group.finish()[0] == "pending"
    group.interrupt()
    assert group.finish()[0] == "interrupted"
    assert before == 3, "the group's, this one's and that of the call"
    assert not seen


def in_child(wrong: Wrong) -> str:
    """The error that a call raises in a forked child, or how it ended otherwise."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        try:
            wrong()
            text = "accepted"
        except BaseException as error:  # noqa: BLE001  told to the parent
            text = f"{type(error).__name__}: {error}"
        os.write(writing, text.encode()[:4000])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as told:
        text = told.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return text if status == 0 else f"ended with {status}"


def main() -> None:
    """Prints the name of every call that is not refused, and how it ended."""
    for name, wrong in WRONG.items():
        text = in_child(wrong)
        if not text.startswith(REFUSED) or "_M_range_check" in text:
            print(f"{name}: {text}")  # noqa: T201
    outlived = in_child(outlive_its_plan)
    print("all were called" if outlived == "accepted" else f"a plan of an exchange under way: {outlived}")  # noqa: T201


def test_wrong_arguments_are_refused() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "tests.csrc.test_wrong_arguments"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert found.stdout == "all were called\n", found.stdout + found.stderr


def test_every_class_of_the_extension_is_tried() -> None:
    tried = {name.split()[0].split(".")[0].split(",")[0] for name in WRONG}
    missing = {kind.__name__ for kind in CLASSES} - tried
    assert missing == set(), missing


if __name__ == "__main__":
    main()
