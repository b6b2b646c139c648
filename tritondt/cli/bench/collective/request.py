"""The request of a benchmark: the cases to be measured, alike on all ranks."""

from __future__ import annotations

from dataclasses import dataclass

from tritondt.cli.bench.collective.case import Case


@dataclass(frozen=True)
class Request:
    """Cases, and the names of the implementations that take turns in each.

    `device` is cpu or cuda; `check` is how often each is run and compared before it is timed, `iterations` how often
    it is timed after `warmup` runs that are not. With `breaks_down`, parts of the engine's moves are timed as well.
    `step` says how one size follows from the one before: times a factor, plus a number of bytes, or not at all (None).
    With `compute_ms`, each is issued beside a compute of so many milliseconds as well.
    """

    collective: str
    cases: tuple[Case, ...]
    sides: tuple[str, ...]
    iterations: int = 20
    warmup: int = 1
    check: int = 1
    average: int = 1
    device: str = "cpu"
    num_threads: int = 1
    breaks_down: bool = False
    step: float | int | None = None
    compute_ms: float = 0.0

    @property
    def step_text(self) -> str | None:
        """The step as nccl-tests' header says it; None where there is one size."""
        if self.step is None:
            return None
        return f"{self.step}(bytes)" if isinstance(self.step, int) else f"{self.step:g}(factor)"

    @property
    def num_ranks(self) -> int:
        """Number of ranks of all cases."""
        return self.cases[0].num_ranks

    @property
    def buffer_bytes(self) -> int:
        """Most bytes that all ranks hold at once: inputs, results, both once more in place, and what is correct."""
        ranks = range(self.num_ranks)
        return max(
            sum(3 * case.itemsize * (case.input_length(rank) + case.output_length(rank)) for rank in ranks)
            for case in self.cases
        )


# Tables of 80 columns have room for nine letters.
_SHORT = {"shared-memory": "shared"}


def label(side: str) -> str:
    """Name of an implementation in tables: of one's own, the function's."""
    return _SHORT.get(side, side.rpartition(":")[2])
