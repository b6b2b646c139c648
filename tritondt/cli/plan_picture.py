"""Pictures of a plan: who sends how much to whom, as a page and as an image."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from tritondt.cli.html_page import page, table
from tritondt.planning.explain import Explanation
from tritondt.planning.spread import Spread
from tritondt.planning.topology import Link
from tritondt.planning.traffic import RankTraffic

if TYPE_CHECKING:
    from tritondt.cli.wide_traffic import WideTraffic

_MOST_GROUPS = 64
_SIDE, _LEFT, _TOP = 640, 60, 30


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
    body += [
        f"<h2>Who sends to whom</h2><p>Senders downwards, receivers across{grouped}; a stronger colour is more, the "
        f"strongest {most:,} bytes, and each cell says its own under the pointer.</p>",
        _matrix(rows, size),
    ]
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


def _matrix(rows: list[list[int]], size: int) -> str:
    cells = "".join(_cells(rows, size))
    side = _SIDE + _LEFT
    return (
        f'<svg style="max-width:{side}px" viewBox="0 0 {side} {_SIDE + _TOP}" role="img" '
        f'aria-label="bytes between ranks">{cells}</svg>'
    )


def _cells(rows: list[list[int]], size: int) -> Iterator[str]:
    width, most = _SIDE / len(rows), max(map(max, rows)) or 1
    step = max(1, len(rows) // 16)
    for number in range(0, len(rows), step):
        middle = (number + 0.5) * width
        yield f'<text x="{_LEFT + middle:.1f}" y="{_TOP - 8}" text-anchor="middle">{number * size}</text>'
        yield f'<text x="{_LEFT - 8}" y="{_TOP + middle + 4:.1f}" text-anchor="end">{number * size}</text>'
    for sender, row in enumerate(rows):
        for receiver, num_bytes in enumerate(row):
            place = f'x="{_LEFT + receiver * width:.1f}" y="{_TOP + sender * width:.1f}"'
            told = escape(f"{_group(sender, size)} to {_group(receiver, size)}: {num_bytes:,} bytes")
            opacity = 0.04 + 0.96 * num_bytes / most if num_bytes else 0.04
            yield (
                f'<rect {place} width="{width * 0.94:.2f}" height="{width * 0.94:.2f}" fill="#1f86b8" '
                f'fill-opacity="{opacity:.3f}"><title>{told}</title></rect>'
            )


def _group(number: int, size: int) -> str:
    first = number * size
    return f"rank {first}" if size == 1 else f"ranks {first}..{first + size - 1}"


def write_png(path: Path, title: str, traffic: RankTraffic | WideTraffic) -> None:
    """Writes the bytes between all ranks as an image, by matplotlib without a display."""
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(7, 6.2), layout="constrained")
    axes = figure.subplots()
    rows, size = traffic.blocks(4 * _MOST_GROUPS)
    end = len(rows) * size - 0.5
    image = axes.imshow(rows, cmap="Blues", interpolation="nearest", vmin=0, extent=(-0.5, end, end, -0.5))
    axes.set(title=title, xlabel="receiver", ylabel="sender")
    whole = importlib.import_module("matplotlib.ticker").MaxNLocator
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(whole(integer=True))  # a rank has no half
    figure.colorbar(image, label="bytes" if size == 1 else f"bytes between groups of {size} ranks")
    figure.savefig(path, format="png", dpi=120)
