"""Pictures of a plan: who sends how much to whom, as a page and as an image."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tritondt.cli.charts import as_svg, matplotlib, new_figure
from tritondt.cli.html_page import charts, page, table
from tritondt.planning.explain import Explanation
from tritondt.planning.spread import Spread
from tritondt.planning.topology import Link
from tritondt.planning.traffic import RankTraffic

if TYPE_CHECKING:
    from tritondt.cli.wide_traffic import WideTraffic

_MOST_GROUPS = 64
# Cells of more groups have no room for figures.
_MOST_WITH_FIGURES = 16


def write_html(
    path: Path,
    explained: Explanation,
    traffic: RankTraffic | WideTraffic,
    links: Mapping[str, tuple[Spread, Link]],
    of_torch: str | None,
) -> None:
    """Writes a page that asks no network: the explanation, the spread over ranks, and the bytes between all ranks.

    `links` are loads by kind, none without a topology; `of_torch` says what torch would move, None where not asked.
    """
    rows, size = traffic.blocks(_MOST_GROUPS)
    grouped = "" if size == 1 else f", in groups of {size} neighbouring ranks"
    most = max(map(max, rows))
    body = [explained._repr_html_()]
    if of_torch is not None:
        body.append(f"<p>{escape(of_torch)}</p>")
    body += ["<h2>Over all ranks</h2>", spread_table(traffic)]
    if links:
        body += ["<h2>Bytes over links</h2>", table(LINK_HEADER, link_rows(links))]
    told = f"Senders downwards, receivers across{grouped}; a darker colour is more, the darkest {most:,} bytes."
    body += [f"<h2>Who sends to whom</h2><p>{told}</p>", charts([as_svg(_drawn(rows, size, ""), told)])]
    path.write_text(page(f"{explained.source} -> {explained.target} of {explained.shape}", body), encoding="utf-8")


def spread_table(traffic: RankTraffic | WideTraffic) -> str:
    """The spread of bytes and messages over ranks as a table."""
    head = ("a rank's", "least", "mean", "most", "of rank", "all ranks")
    return table(head, spread_rows(traffic.spreads))


def spread_rows(spreads: Mapping[str, Spread]) -> list[tuple[str, ...]]:
    """Rows of that table."""
    return [
        (name, f"{s.least:,}", f"{s.mean:,.1f}", f"{s.most:,}", str(s.most_on), f"{s.total:,}")
        for name, s in spreads.items()
    ]


LINK_HEADER = ("bytes over links", "least", "mean", "most", "busiest")


def link_rows(links: Mapping[str, tuple[Spread, Link]]) -> list[tuple[str, ...]]:
    """Rows of the bytes over links, by their kind."""
    return [
        (kind, f"{s.least:,}", f"{s.mean:,.1f}", f"{s.most:,}", f"{link.source} -> {link.target}")
        for kind, (s, link) in links.items()
    ]


def write_png(path: Path, title: str, traffic: RankTraffic | WideTraffic) -> None:
    """Writes the bytes between all ranks as an image."""
    rows, size = traffic.blocks(4 * _MOST_GROUPS)
    _drawn(rows, size, title).savefig(path, format="png", dpi=120)


def _drawn(rows: list[list[int]], size: int, title: str) -> Any:
    """Figure of the bytes between groups of ranks: a row for each group that sends; few groups have figures, too."""
    figure = new_figure((7, 6.2))
    axes = figure.subplots()
    end = len(rows) * size - 0.5
    image = axes.imshow(rows, cmap="Blues", interpolation="nearest", vmin=0, extent=(-0.5, end, end, -0.5))
    axes.set(title=title, xlabel="receiver", ylabel="sender")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(matplotlib("ticker").MaxNLocator(integer=True))  # a rank has no half
    if len(rows) <= _MOST_WITH_FIGURES:
        most = max(map(max, rows))
        for sender, row in enumerate(rows):
            for receiver, num_bytes in enumerate(row):
                middle = ((receiver + 0.5) * size - 0.5, (sender + 0.5) * size - 0.5)
                colour = "white" if 2 * num_bytes > most else "black"
                axes.text(*middle, f"{num_bytes:,}", ha="center", va="center", fontsize=7, color=colour)
    figure.colorbar(image, label="bytes" if size == 1 else f"bytes between groups of {size} ranks")
    return figure
