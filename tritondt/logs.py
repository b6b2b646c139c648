"""Loggers under "tritondt", and the levels that the environment gives them.

- tritondt.world tells at INFO of worlds, their communicators and process groups: who takes part, and what carries them.
- tritondt.moves tells at DEBUG of every redistribution that an operator's argument needs and that sends bytes.
- tritondt.exchanges tells at DEBUG of every step of a redistribution, with its bytes, messages and time.

A program that sets up logging gets these records as it gets those of other libraries. TRITONDT_LOG sets levels when a
world is made, and writes to stderr where nobody has set up logging.
"""

import logging
from collections.abc import Callable

from tritondt import environment, events, identity

_ROOT = logging.getLogger("tritondt")
world = logging.getLogger("tritondt.world")
moves = logging.getLogger("tritondt.moves")
exchanges = logging.getLogger("tritondt.exchanges")

# Loggers whose levels the environment has set, and the end of the subscription to steps.
_given: set[logging.Logger] = set()
_unsubscribe: list[Callable[[], None]] = []


def set_up() -> None:
    """Gives the loggers the levels of TRITONDT_LOG or TORCH_DISTRIBUTED_DEBUG, or theirs back where neither is set.

    Raises WorldError for values that are not allowed.
    """
    levels = {
        logging.getLogger(f"tritondt.{name}" if name else "tritondt"): level
        for name, level in environment.log_levels().items()
    }
    for logger in _given - set(levels):
        logger.setLevel(logging.NOTSET)
    for logger, level in levels.items():
        logger.setLevel(level)
    _given.clear()
    _given.update(levels)
    if levels and not _ROOT.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        _ROOT.addHandler(handler)
    if exchanges.isEnabledFor(logging.DEBUG) and not _unsubscribe:
        _unsubscribe.append(events.subscribe(_log_step))
    elif _unsubscribe and not exchanges.isEnabledFor(logging.DEBUG):
        _unsubscribe.pop()()


def _log_step(step: events.StepRan) -> None:
    exchanges.debug(
        "rank %d: %s of %s from %s to %s: sent %s bytes in %d messages, received %s bytes in %d, %.0f us",
        identity.current().rank,
        step.kind,
        step.shape,
        step.source,
        step.target,
        f"{step.sent_bytes:,}",
        step.num_sent,
        f"{step.received_bytes:,}",
        step.num_received,
        step.seconds * 1e6,
    )
