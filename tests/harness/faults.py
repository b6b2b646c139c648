"""Faults of one rank in the middle of training, as values: what happens, when, on which ranks, and what others say.

A fault strikes while an exchange of the rank at fault is at a moment: packing, with its messages half gone, or
unpacking. What the user's code does (raise, return, exit) it does while its own asynchronous exchange is there.
"""

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

SIZE = 3
Moment = Literal["pack", "exchange", "unpack"]
Ranks = Literal["threads", "sockets", "shared-memory", "gloo", "nccl", "slots"]
Code = Literal["forward", "backward", "hook"]
MOMENTS: tuple[Moment, ...] = ("pack", "exchange", "unpack")
# Those of the table; slots on GPUs are NCCL's ranks that pack into each other's memory.
RANKS: tuple[Ranks, ...] = ("threads", "sockets", "shared-memory", "gloo", "nccl")


class Fault(NamedTuple):
    """What goes wrong, and what the others are told in the words of the table.

    `code` is the user's code in which it does, None for one of the whole process or of the exchange itself;
    `not_on_threads` says why it does not exist there. The others hear of it, unless it `is_silent`: then they wait for
    the timeout. With `hosts_store` it strikes rank 0, whose process holds the store, and else rank 1.
    """

    name: str
    told: str
    code: Code | None = None
    not_on_threads: str = ""
    is_silent: bool = False
    ends_process: bool = False
    hosts_store: bool = False
    told_on_threads: str = ""

    def told_on(self, ranks: Ranks) -> str:
        """What the others are told where ranks are such."""
        return self.told_on_threads if self.told_on_threads and ranks == "threads" else self.told

    @property
    def culprit(self) -> int:
        """The rank that it strikes."""
        return 0 if self.hosts_store else 1


_ALL_THREADS = "threads share a process, so a kill or a stop would hit all ranks"
_CLOSED, _RAISED, _SILENT, _ENDED = "its connection closed", "what it raised", "no answer in time", "it has ended"
FAULTS = (
    Fault("killed", _CLOSED, not_on_threads=_ALL_THREADS, ends_process=True),
    Fault("killed with the store", _CLOSED, not_on_threads=_ALL_THREADS, ends_process=True, hosts_store=True),
    Fault("stopped", _SILENT, not_on_threads=_ALL_THREADS, is_silent=True),
    Fault("stopped with the store", _SILENT, not_on_threads=_ALL_THREADS, is_silent=True, hosts_store=True),
    Fault("out of memory", _RAISED),
    Fault("raises in forward", _RAISED, "forward"),
    Fault("raises in backward", _RAISED, "backward"),
    Fault("raises in a hook", _RAISED, "hook"),
    Fault("returns early", _SILENT, "forward", is_silent=True, told_on_threads=_ENDED),
    Fault("exits early", _CLOSED, "forward", "sys.exit in a thread is an exception", ends_process=True),
)


class Case(NamedTuple):
    """A fault at a moment; `is_async` says how the exchange was asked for."""

    fault: Fault
    moment: Moment
    is_async: bool

    def __str__(self) -> str:
        return f"{self.fault.name}, {self.moment}, {'async' if self.is_async else 'sync'}"


def cases_of(fault: Fault, ranks: Ranks) -> tuple[Case, ...]:
    """All cases of a fault that exist on such ranks: what user's code does happens beside an asynchronous exchange.

    With or without the store, and in a stream, an exchange that was asked for in either way breaks alike: there, one of
    them is enough.
    """
    if ranks == "threads" and fault.not_on_threads:
        return ()
    breaks_alike = fault.code is not None or fault.hosts_store or ranks in ("nccl", "slots")
    ways = (True,) if breaks_alike else (False, True)
    return tuple(Case(fault, moment, is_async) for moment in MOMENTS for is_async in ways)


class Outcome(NamedTuple):
    """What a rank raised, and how long after the fault; where it raised nothing `kind` says so."""

    kind: str
    text: str
    seconds: float


class Observation(NamedTuple):
    """What became of the ranks of a case, by rank.

    `left_behind` is what a rank still had when its world had ended, `wrong` how it differed after it had trained on;
    `hung` ranks were killed by the test.
    """

    outcomes: dict[int, Outcome]
    left_behind: dict[int, list[str]]
    wrong: dict[int, str]
    hung: Sequence[str]


# How the texts of errors say it, in the order in which they are looked for: one that says two of them heard the first.
_NEWS = {
    _RAISED: r"(?:PlantedError: the \w+ is broken|RuntimeError: .*can't allocate memory)",
    # By the rank, or by the store in its process: who has all of its messages waits for somebody that waits for it.
    _SILENT: r"(?:got no answer; the timeout is 2 s|which rank 0 holds, has not answered for 1 s)",
    _ENDED: r"(?<!process of )rank \d has ended",
    _CLOSED: r"closed its connection|lost ranks? \d.*(?:ncclRemoteError|process of rank \d has ended)",
}


def news(text: str) -> str:
    """What the text of an error says happened, in the words of the table."""
    for words, pattern in _NEWS.items():
        if re.search(pattern, text):
            return words
    return f"something else: {text}"
