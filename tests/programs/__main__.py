"""Random programs from the command line: python -m tests.programs --seed 0 --count 1000 --jobs 2."""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tests.harness.gloo_ranks import GlooRanks
from tests.programs.campaign import Campaign, Finding, Tally
from tests.programs.generator import FAMILY, WEIGHTS, random_program
from tests.programs.jobs import run_families
from tests.programs.printing import listing, printed
from tests.programs.ranks import Trace, quieten, run_on_processes
from tests.programs.statements import Program

SWITCHES = (*WEIGHTS, "partial", "outside", "no_grad", "inference_mode", "enable_grad", "refused", "dealt")


def main() -> int:
    """The exit status: 1 where a program failed."""
    asked = _arguments()
    leave_out = [name for name in asked.without.split(",") if name]
    unknown = sorted(set(leave_out) - set(SWITCHES))
    if unknown:
        sys.exit(f"--without got {', '.join(unknown)}; allowed are {', '.join(SWITCHES)}")
    if asked.ranks == "threads":
        # torch.compile holds a lock while it compiles: a rank thread that waits for its turn there stops all others.
        leave_out.append("compile")
    if asked.show:
        print(printed(random_program(asked.seed, leave_out)))
        return 0
    begun, tally = time.time(), Tally()
    seeds = range(asked.seed, asked.seed + asked.count)
    if asked.seconds:
        seeds = range(asked.seed, asked.seed + 10_000_000)
    parts = (
        _on_processes(seeds, leave_out)
        if asked.ranks == "processes"
        else run_families(
            seeds,
            asked.jobs,
            leave_out,
            minimise=not asked.whole,
            until=begun + asked.seconds if asked.seconds else None,
        )
    )
    for part in parts:
        tally.add(part)
        for finding in part.findings:
            _tell(finding, asked.out)
        if asked.progress:
            print(_summary(tally, begun), file=sys.stderr, flush=True)
    for text, count in Counter(_reason(text) for text in tally.refused.elements()).most_common(asked.refused):
        print(f"refused {count} times: {text}")
    print(_summary(tally, begun))
    if asked.json:
        asked.json.write_text(json.dumps(_as_json(tally, begun), indent=1))
    return 1 if tally.findings else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.programs", description="Random programs against one device.")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=1000, help="how many seeds")
    parser.add_argument("--seconds", type=float, default=0, help="begin programs for so long, whatever --count")
    parser.add_argument("--jobs", type=int, default=2, help="worker processes side by side")
    parser.add_argument("--ranks", choices=("threads", "processes"), default="threads")
    parser.add_argument("--without", default="", help=f"leave kinds of statements out: {', '.join(SWITCHES)}")
    parser.add_argument("--whole", action="store_true", help="do not minimise failing programs")
    parser.add_argument("--refused", type=int, default=0, help="print the so many most frequent refusals")
    parser.add_argument("--out", type=Path, help="a folder for failing programs as files")
    parser.add_argument("--json", type=Path, help="a file for the summary")
    parser.add_argument("--progress", action="store_true", help="a line for every family of seeds")
    parser.add_argument("--show", action="store_true", help="print the program of --seed and do not run it")
    return parser.parse_args()


def _on_processes(seeds: range, leave_out: list[str]):
    """Tallies of families of seeds on processes, which are started once for each size of world."""
    quieten()
    of_size: dict[int, GlooRanks] = {}
    with ExitStack() as ending:

        def run(programs: Sequence[Program], world_size: int) -> list[list[Trace]]:
            if world_size not in of_size:
                of_size[world_size] = ending.enter_context(GlooRanks(world_size))
            return run_on_processes(of_size[world_size], programs)

        campaign = Campaign(leave_out, run_all=run)
        for start in range(seeds.start, seeds.stop, FAMILY):
            yield campaign.run(range(start, min(start + FAMILY, seeds.stop)))


def _tell(finding: Finding, folder: Path | None) -> None:
    failure = finding.failure
    text = f"{failure.kind} at statement {failure.number} {failure.name}: {failure.text}"
    print(f"FAILED {listing(finding.minimal)}\n    {text}\n", flush=True)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"program_{finding.program.seed}.py"
        path.write_text(printed(finding.minimal, text, finding.tolerances))


def _reason(refused: str) -> str:
    """The text of a refusal without what it was asked."""
    kind, _, text = refused.partition(": ")
    return f"{kind}: {text.rpartition(' Error: ')[2]}"[:200]


def _summary(tally: Tally, begun: float) -> str:
    seconds = time.time() - begun
    return (
        f"{tally.programs} programs, {tally.statements} statements, {tally.refused.total()} refused, "
        f"{len(tally.findings)} failures, {seconds:.0f} seconds"
    )


def _as_json(tally: Tally, begun: float) -> dict[str, object]:
    findings = [
        {"seed": it.program.seed, "kind": it.failure.kind, "text": it.failure.text, "program": listing(it.minimal)}
        for it in tally.findings
    ]
    counts = {"programs": tally.programs, "statements": tally.statements, "refused": dict(tally.refused)}
    return counts | {"seconds": time.time() - begun, "failures": findings}


if __name__ == "__main__":
    sys.exit(main())
