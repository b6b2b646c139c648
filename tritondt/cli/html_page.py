"""A self-contained HTML page: one file that asks no network, with light and dark colours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1c1c; --paper: #fff; --faint: #ddd; --wrong: #b00020; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e4e4; --paper: #181818; --faint: #444; --wrong: #ff8090; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2em auto;
  max-width: 1240px; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.2em; margin-top: 2em; } h3 { font-size: 1em; margin-bottom: .3em; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }
td, th { border-bottom: 1px solid var(--faint); padding: .15em .7em; text-align: right; }
td:first-child, th:first-child, td.text, th.text { text-align: left; }
.wrong { color: var(--wrong); font-weight: bold; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(340px, 1fr)); gap: 1em; }
.scroll { overflow-x: auto; }
svg { width: 100%; max-width: 640px; height: auto; background: #fff; }
.key { display: inline-block; width: .9em; height: .9em; margin: 0 .3em 0 1em; vertical-align: -1px; }
pre { overflow-x: auto; font-size: 12.5px; } details { margin: .6em 0; }
"""


def page(title: str, body: Iterable[str]) -> str:
    """The page as text; every part of `body` is HTML."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{_STYLE}</style></head><body>'
        f"<h1>{escape(title)}</h1>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]], marked: Mapping[int, str] | None = None) -> str:
    """A table; `marked` gives rows, by number, a class.

    >>> table(("a < b",), [("1",)])
    '<div class="scroll"><table><tr><th>a &lt; b</th></tr><tr><td>1</td></tr></table></div>'
    """
    classes = marked or {}
    lines = ["<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>"]
    for number, row in enumerate(rows):
        start = f'<tr class="{classes[number]}">' if number in classes else "<tr>"
        lines.append(start + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>")
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'


def legend(colours: Mapping[str, str]) -> str:
    """Names beside their colours."""
    keys = (f'<span class="key" style="background:{colour}"></span>{escape(name)}' for name, colour in colours.items())
    return f"<p>{''.join(keys)}</p>"


def charts(drawings: Iterable[str]) -> str:
    """Charts side by side, as many as fit."""
    return f'<div class="charts">{"".join(f"<div>{drawing}</div>" for drawing in drawings)}</div>'
