"""Progress of a run: a bar on a terminal, a line every ten steps elsewhere."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tritondt.cli.demo.experiment import Experiment, Step

_STEPS_PER_LINE = 10


class RunProgress:
    """Context manager to call with every finished step of the run named `title`."""

    def __init__(self, console: Console, title: str, experiment: Experiment) -> None:
        self._console, self._title, self._experiment = console, title, experiment
        self._bar = Progress(
            TextColumn(f"{title:>9}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(title, total=experiment.steps, state="starting")

    def __enter__(self) -> RunProgress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def __call__(self, step: Step) -> None:
        tokens_per_s = self._experiment.tokens_per_step / step.seconds
        state = f"loss {step.loss:.4f}  {tokens_per_s:7,.0f} tokens/s"
        self._bar.update(self._task, advance=1, state=state)
        done = step.index + 1
        shown = done % _STEPS_PER_LINE == 0 or done in (1, self._experiment.steps)
        if shown and not self._console.is_terminal:
            self._console.print(f"{self._title:>9}  step {done:3}/{self._experiment.steps}  {state}", highlight=False)
