"""The page of a found plan: its program and tables, and those of all meshes where they were compared."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path

from tritondt.cli.html_page import page, table
from tritondt.found_plan import FoundMesh, FoundPlan
from tritondt.found_plan.step_cost import closing_lines, part_rows, traffic_rows


def write_page(path: Path, found: FoundPlan | FoundMesh) -> None:
    """Writes a page that asks no network."""
    if isinstance(found, FoundPlan):
        path.write_text(page(f"a step of rank {found.rank} of {found.mesh}", _of_plan(found)), encoding="utf-8")
        return
    head, *rows = found.rows()
    body = [table(head, rows), *_paragraphs(f"{mesh}: {why}" for mesh, why in found.refused)]
    body += [f"<h2>{escape(str(found.best.mesh))}</h2>", *_of_plan(found.best)]
    path.write_text(page(f"least {found.objective} of a rank", body), encoding="utf-8")


def _of_plan(plan: FoundPlan) -> list[str]:
    body = [f"<pre>{escape(plan.code)}</pre>"]
    if plan.parts:
        head, *rows = part_rows(plan.parts)
        body.append(table(head, rows))
    head, *rows = traffic_rows(plan.step)
    closing = closing_lines(plan.step, plan.notes, is_exact=plan.is_exact)
    return [*body, "<h3>whole step</h3>", table(head, rows), *_paragraphs(closing)]


def _paragraphs(lines: Iterable[str]) -> list[str]:
    return [f"<p>{escape(line)}</p>" for line in lines]
