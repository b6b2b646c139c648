"""Measures one operator: trials at random, and a search for a placement under which nothing is sent."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import tritondt as T
from benchmarks.ops.op_coverage.operators import Operator
from benchmarks.ops.op_coverage.placing import promising, random_placement
from benchmarks.ops.op_coverage.sides import Side
from benchmarks.ops.op_coverage.trial import (
    OURS,
    RAISES,
    RIGHT,
    WRONG,
    Case,
    NotMeasuredError,
    Outcome,
    made_case,
    run_trial,
)

NUM_RANKS = (2, 3)
# Of the search for a placement that sends nothing.
_MOST_SAMPLES, _MOST_SEARCHED = 12, 60
_TEXT_LENGTH = 600


@dataclass
class Measured:
    """Findings about one operator."""

    name: str
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys((RIGHT, RAISES, WRONG), 0))
    # Whether it ran right in a sharded placement without a byte sent, or without its arguments moved.
    sends_nothing: bool = False
    moves_nothing: bool = False
    texts: dict[str, str] = field(default_factory=dict)
    # Trials of equal cuts that both libraries run, and those in which ours sends more until no result is terms: its
    # bytes, and the other's.
    num_compared: int = 0
    # Of these, trials in which terms became whole, as they do here, and pieces there, which is half of the bytes.
    num_terms_whole: int = 0
    more_bytes: dict[str, tuple[int, int]] = field(default_factory=dict)
    # The other library in the same trials.
    other: Measured | None = None

    @property
    def verdict(self) -> str:
        """Right always, raises always, raises sometimes, wrong, or not measured."""
        if self.counts[WRONG]:
            return WRONG
        if not self.counts[RAISES]:
            return "right always" if self.counts[RIGHT] else "not measured"
        return "raises sometimes" if self.counts[RIGHT] else "raises always"

    def add(self, outcome: Outcome, trial: str) -> None:
        """Counts a trial; one text is kept of each kind of error."""
        self.counts[outcome.verdict] += 1
        if outcome.verdict != RIGHT and len(self.texts) < 8:
            text = outcome.text[:_TEXT_LENGTH]
            if text.split("(")[0] not in {known.split("(")[0] for known in self.texts.values()}:
                self.texts[trial] = text

    def compare(self, outcome: Outcome, of_other: Outcome, trial: str, *, has_terms: bool) -> None:
        """Compares the bytes of both libraries in one trial, until no result is terms."""
        self.num_compared += 1
        own, other = outcome.bytes_without_terms(of_other), of_other.bytes_without_terms(outcome)
        if has_terms and other < own <= 2 * other:
            self.num_terms_whole += 1
        elif own > other:
            self.more_bytes[trial] = own, other

    def note(self, outcome: Outcome) -> None:
        """Takes note of a right call of sharded arguments."""
        self.sends_nothing |= outcome.sent_bytes == 0
        self.moves_nothing |= outcome.num_moved == 0


def measure(operator: Operator, num_trials: int, other: Side | None = None) -> Measured:
    """`num_trials` random trials, the ranks' numbers in turns, and the search; the same trials with `other` as well."""
    found = Measured(operator.name, other=None if other is None else Measured(operator.name))
    samples = operator.samples()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(num_trials):
            try:
                outcome, placements, case = random_trial(operator, samples, number)
            except NotMeasuredError:
                continue
            found.add(outcome, f"trial {number}")
            if found.other is not None:
                of_other = random_trial(operator, samples, number, other or OURS)[0]
                found.other.add(of_other, f"trial {number}")
                if {outcome.verdict, of_other.verdict} == {RIGHT} and all(map(_is_plain, placements)):
                    has_terms = any(isinstance(placement, T.Partial) for placement in placements)
                    found.compare(outcome, of_other, f"trial {number}", has_terms=has_terms)
            if outcome.verdict == RIGHT and _really_sharded(case, placements):
                found.note(outcome)
            gc.collect(0)
        if not found.sends_nothing:
            _search(operator, samples, found)
    return found


def random_trial(
    operator: Operator, samples: list[Any], number: int, side: Side = OURS
) -> tuple[Outcome, list[T.Placement], Case]:
    """Trial `number` of an operator, the same in every process."""
    random = operator.random("trial", number)
    num_ranks = NUM_RANKS[number % len(NUM_RANKS)]
    case = _measurable(operator, samples, random)
    written = case.expected.written
    placements = [
        random_placement(tensor, num_ranks, random, is_written=is_written)
        for tensor, is_written in zip(case.tensors, written, strict=True)
    ]
    outcome = run_trial(case, placements, num_ranks, seed=number, gradients=operator.is_differentiable, side=side)
    return outcome, placements, case


def _is_plain(placement: T.Placement) -> bool:
    """Whether the other library has this placement too."""
    return not isinstance(placement, T.Shard) or placement == T.Shard(placement.dim)


def _measurable(operator: Operator, samples: list[Any], random: Random) -> Case:
    """A sample that one device takes."""
    for _ in range(10):
        try:
            return made_case(operator, samples[random.randrange(len(samples))])
        except NotMeasuredError:
            continue
    raise NotMeasuredError(f"one device refuses 10 samples of {operator.name}")


def _really_sharded(case: Case, placements: list[T.Placement]) -> bool:
    """Whether at least two ranks hold something of a sharded tensor."""
    return any(
        isinstance(placement, T.Shard)
        and tensor.numel()
        and tensor.shape[placement.dim] > 1
        and (placement.sizes is None or sum(size > 0 for size in placement.sizes) > 1)
        for tensor, placement in zip(case.tensors, placements, strict=True)
    )


def _search(operator: Operator, samples: list[Any], found: Measured) -> None:
    """Looks for a placement that sends nothing; a wrong result on the way counts like any other."""
    for number, (case, placements) in enumerate(_searched(operator, samples)):
        if number == _MOST_SEARCHED:
            return
        outcome = run_trial(case, placements, NUM_RANKS[0], seed=number, gradients=False)
        if outcome.verdict == WRONG:
            found.add(outcome, f"search {number}")
        if outcome.verdict == RIGHT:
            found.note(outcome)
        if found.sends_nothing:
            return


def _searched(operator: Operator, samples: list[Any]) -> Iterator[tuple[Case, list[T.Placement]]]:
    """Samples in turns, each with its next promising placement."""
    left = []
    for sample in samples[:: max(1, len(samples) // _MOST_SAMPLES)]:
        try:
            case = made_case(operator, sample)
        except NotMeasuredError:
            continue
        left.append((case, promising(case.tensors, NUM_RANKS[0])))
    while left:
        remaining = []
        for case, placements in left:
            candidate = next(placements, None)
            if candidate is not None:
                yield case, candidate
                remaining.append((case, placements))
        left = remaining
