"""Implementations of the collectives, by name: what a rank runs when one of them is measured."""

from __future__ import annotations

import importlib
import inspect
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist

from tritondt.cli.bench.collective.case import Case
from tritondt.cli.user_error import BenchmarkError

# What is timed. A tensor that it returns is the result; else the result is in the call's `out`.
Run = Callable[[], torch.Tensor | None]


class NotOfferedError(Exception):
    """A collective that an implementation does not have, in a sentence; raised alike on all ranks."""


@dataclass(frozen=True)
class Call:
    """One collective on this rank: `x` is what it gives, `out` is to hold the result.

    Both are one-dimensional, and `case` says of how many elements; in place, the shorter of them lies in the longer
    one, at this rank's part. `out` is there on ranks without a result too, for libraries that write to it.
    """

    case: Case
    rank: int
    x: torch.Tensor
    out: torch.Tensor
    in_place: bool
    group: dist.ProcessGroup


Bind = Callable[[Call], Run]

# Redistributions on tritondt's own transports.
ENGINE = "engine"
# By name: the backend of torch.distributed whose group the calls are made on.
BACKENDS = {"tritondt": "tritondt", "gloo": "gloo", "nccl": "nccl", "mpi": "mpi", "ucc": "ucc"}
NAMES = ("tritondt", ENGINE, "shared-memory", "torch", "gloo", "nccl", "mpi", "ucc")


def refusal(name: str, device: str) -> str | None:
    """Reason why an implementation is not available here; None where it is. BenchmarkError for an unknown name."""
    if ":" in name:
        load(name)
        return None
    if name not in NAMES:
        raise BenchmarkError(
            f"there is no implementation {name!r}; there are {', '.join(NAMES)}, and one of your own as MODULE:FUNCTION"
        )
    built = {
        "gloo": dist.is_gloo_available,
        "nccl": dist.is_nccl_available,
        "mpi": dist.is_mpi_available,
        "ucc": dist.is_ucc_available,
    }
    backend = backend_of(name, device)
    if backend in built and not built[backend]():
        return f"torch {torch.__version__} is built without {backend}"
    if backend == "nccl" and device != "cuda":
        return "NCCL moves tensors on GPUs only (--device cuda)"
    return None


def backend_of(name: str, device: str) -> str | None:
    """Backend of torch.distributed on which an implementation runs; None for those that bring their own transport."""
    if name == "torch":
        return "nccl" if device == "cuda" else "gloo"
    return BACKENDS.get(name)


def load(name: str) -> Bind:
    """Function that `MODULE:FUNCTION` names; it takes a Call and returns what is to be timed."""
    bind: Bind = imported(name)
    return bind


@contextmanager
def told_errors(names: Sequence[str], case: object) -> Iterator[None]:
    """Context in which an error of a function of one's own is raised as one that says whose it is and on which line.

    `names` are implementations, of which those as MODULE:FUNCTION are one's own; other errors pass.
    """
    try:
        yield
    except NotOfferedError:
        raise
    except Exception as error:
        for name in names:
            frames = _own_frames(error, imported(name)) if ":" in name else []
            if frames:
                at = f"{frames[-1].filename}:{frames[-1].lineno} ({frames[-1].name})"
                text = f"{name} raised {type(error).__name__} at {at}: {error}"
                where = f"on rank {dist.get_rank()} of {dist.get_world_size()}, in {case}"
                lines = "".join(traceback.format_list(frames)).rstrip()
                raise BenchmarkError(f"{text}\n{where}\n{lines}") from error
        raise


def _own_frames(error: Exception, function: Callable[..., Any]) -> list[traceback.FrameSummary]:
    """Frames of an error from the first to the last in the file of a function; none where it never was there."""
    frames = traceback.extract_tb(error.__traceback__)
    code = getattr(inspect.unwrap(function), "__code__", None)
    places = [place for place, frame in enumerate(frames) if code is not None and frame.filename == code.co_filename]
    return list(frames[places[0] : places[-1] + 1]) if places else []


def imported(name: str) -> Callable[..., Any]:
    """Function that `MODULE:FUNCTION` names; BenchmarkError where it is none, or cannot be imported."""
    module_name, _, attribute = name.partition(":")
    try:
        found: Any = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise BenchmarkError(f"the implementation {name!r} cannot be imported: {error}") from error
    if not callable(found):
        raise BenchmarkError(f"the implementation {name!r} is {found!r}; allowed is a function")
    return cast("Callable[..., Any]", found)
