"""Three rank threads of which one fails: what the others raise, what is left, and how they train on."""

import threading
import time
from typing import Any

import tritondt as T
from tests.harness.fault_training import AwayError, PlantedError, fail, train
from tests.harness.faults import SIZE, Case, Observation, Outcome
from tritondt.comm import read_guard
from tritondt.comm.transports.threads import run_ranks

_DEADLINE_S = 100.0


def observe(case: Case) -> Observation:
    """Lets rank threads train, one of them fail, and the others train on: without it, where it has returned."""
    outcomes: dict[int, Outcome] = {}
    wrong: dict[int, str] = {}
    struck: list[float] = []
    before = set(threading.enumerate())

    def body(rank: int) -> None:
        kind, text = _raised(case, rank, lambda: struck.append(time.monotonic()))
        outcomes[rank] = Outcome(kind, text, time.monotonic() - struck[0])
        if kind != "AwayError":
            left = [other for other in range(SIZE) if case.fault.name != "returns early" or other != case.fault.culprit]
            wrong[rank] = train(T.Mesh((len(left),), ranks=left))
            T.close()

    ranks = threading.Thread(target=run_ranks, args=(SIZE, body), daemon=True)
    ranks.start()
    ranks.join(_DEADLINE_S)
    hung = [f"{other.name} has not ended" for other in set(threading.enumerate()) - before]
    left_behind = [f"storages still read: {dict(read_guard.readers)}"] if read_guard.readers else []
    return Observation(outcomes, dict.fromkeys(range(SIZE), left_behind), wrong, tuple(hung))


def _raised(case: Case, rank: int, tell: Any) -> tuple[str, str]:
    """Trains until something is raised, and ends the world as a program would; who returns early does not."""
    try:
        fail(case, rank, 1.0, tell)
    except AwayError:
        return "AwayError", ""
    except (T.TritondtError, PlantedError, RuntimeError) as error:
        found = type(error).__name__, str(error)
        T.abort()
        return found
    return "nothing", ""
