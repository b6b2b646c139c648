"""Pages of benchmarks and traces: what is drawn, what is refused, and that a browser has nothing to complain of."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.harness.chromium import find_chromium, opened
from tritondt.cli.bench.page import points_of
from tritondt.cli.main import main
from tritondt.cli.svg import COLOURS, Series, histogram, line_chart
from tritondt.cli.trace import page as trace_of
from tritondt.cli.trace.page import trace_page

AROUND = {
    "date": "2026-11-23T00:00:00+00:00",
    "machine": {"platform": "<Linux>", "processor": "a & b", "cores": 2},
    "versions": {"tritondt": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
}


def iterations(*times_us: float) -> dict[str, object]:
    return {"times_us": list(times_us)}


def result(side: str, size: int, time_us: float, wrong: int | None = 0) -> dict[str, object]:
    place = {"time": time_us, "alg_bw": size / time_us / 1e3, "bus_bw": size / time_us / 1e3, "nwrong": wrong}
    return {
        "size": size,
        "count": size // 4,
        "type": "float",
        "redop": "sum",
        "root": -1,
        "implementation": side,
        "parts": [size // 2] * 2,
        "note": "",
        "out_of_place": place,
        "in_place": None,
        "in_place_per_iter": None,
        "out_of_place_per_iter": iterations(*(time_us * (1 + number / 10) for number in range(9))),
    }


def collective(**others: object) -> dict[str, object]:
    results = [
        result("tritondt", 1 << 10, 20.0),
        result("torch", 1 << 10, 40.0),
        result("tritondt", 1 << 20, 500.0),
        result("torch", 1 << 20, 400.0, wrong=3),
        result("torch", 1 << 22, 1600.0, wrong=None),
    ]
    return {"benchmark": "all_reduce", **AROUND, "config": {"ranks": 2}, "results": results, "complete": True, **others}


def redistributions() -> dict[str, object]:
    seconds = [0.001 * (1 + number / 10) for number in range(9)]
    case: dict[str, object] = {"shape": [64, 96], "mesh": [4], "source": "(S0)", "target": "(S1)", "seconds": seconds}
    case |= {"median_s": 0.0014, "bus_gb_per_s": 0.5, "torch_seconds": [2 * each for each in seconds]}
    return {
        "benchmark": "redistribute",
        **AROUND,
        "ranks": 4,
        "dtype": "float32",
        "cases": [case],
        "complete": False,
    } | {"errors": ["rank 1 <stopped>"]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.json").write_text(json.dumps(collective()))
    (tmp_path / "b.json").write_text(json.dumps(redistributions()))
    (tmp_path / "other.json").write_text('{"cases": [{}]}')
    return tmp_path


def test_a_report_has_every_result_and_says_what_it_leaves_out(folder):
    ended = CliRunner().invoke(main, ["bench", "report", str(folder)])
    assert ended.exit_code == 0, ended.output
    assert ended.output == f"{folder / 'report.html'}: 2 results, 1 files left out\n"
    page = (folder / "report.html").read_text()
    # One of bandwidths, one of ratios, and a histogram for each of 3 sizes; then one of each.
    assert page.count("<svg") == (1 + 1 + 3) + 3
    assert "all_reduce on 2 ranks (a.json)" in page
    assert "redistribute on 4 ranks (b.json)" in page
    assert "platform &lt;Linux&gt;, processor a &amp; b" in page
    assert "partial: rank 1 &lt;stopped&gt;" in page
    assert "other.json: " in page
    assert page.count('text-anchor="end">bytes</text>') == 4  # below each bandwidth and ratio
    assert "ratio: 0.5 at" not in page
    assert "tritondt: 0.5 at 1K" in page
    # What is wrong, or unchecked, is in the table alone.
    assert not re.search(r"<title>torch: [\d.]+ at [14]M", page)
    assert page.count('class="wrong"><td>') == 1
    assert "<td>N/A</td>" in page
    assert not re.search(r"(src|href)=[\"'](?!data:)|https?://|@import|<script", page), "it asks the network"


def test_the_points_of_a_redistribution_have_the_bandwidth_of_their_own_time():
    ours, theirs = points_of(redistributions())
    assert (ours.side, theirs.side, ours.size) == ("tritondt", "torch", 64 * 96 * 4)
    assert ours.bus_gb_per_s == pytest.approx(0.5)
    assert theirs.bus_gb_per_s == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        (["{}/nowhere"], 2, "is no folder; allowed is one with results of bench --json"),
        (["{}"], 1, "has no result of bench --json among 1 files that end in .json; nothing is written"),
        (["{}", "--out", "/nowhere/report.html"], 2, "/nowhere/report.html cannot be written: No such file"),
    ],
)
def test_what_cannot_be_reported_is_refused(tmp_path, arguments, status, sentence):
    (tmp_path / "other.json").write_text("[]")
    ended = CliRunner().invoke(main, ["bench", "report", *(text.format(tmp_path) for text in arguments)])
    assert ended.exit_code == status
    assert sentence in ended.output
    assert not (tmp_path / "report.html").exists()


def test_charts_of_one_point_or_equal_values_are_drawn():
    assert "nan" not in line_chart("a", "GB/s", [Series("b", [(4, 0.0)], 0)], str) + line_chart("a", "x", [], str)
    drawn = histogram("a", "ms", {"b": [1.0, 1.0], "c": [0.0]}, {"b": 0, "c": 1})
    assert drawn.count("<rect") == 2
    assert histogram("a", "ms", {"b": [0.0]}, {"b": 0}).count("<rect") == 1


def test_histograms_of_several_lie_in_lanes_of_their_own():
    drawn = histogram("a", "ms", {"b": [1.0, 1.0, 2.0], "c": [1.0, 2.0, 2.0]}, {"b": 0, "c": 1})
    bars = re.findall(r'y="([\d.]+)" width="[\d.]+" height="([\d.]+)" fill="(#\w+)"', drawn)
    lowest = {colour: max(float(y) + float(height) for y, height, own in bars if own == colour) for *_, colour in bars}
    highest = {colour: min(float(y) for y, _, own in bars if own == colour) for *_, colour in bars}
    first, second = COLOURS[:2]
    assert len(bars) == 4
    assert lowest[first] <= highest[second]
    assert re.findall(r'class="lane">(\w)<', drawn) == ["b", "c"]


def luminance(colour: str) -> float:
    """Relative luminance, as the accessibility guidelines for the web (WCAG) define it."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("colour", [*COLOURS, *trace_of.COLOURS.values()])
@pytest.mark.parametrize("paper", ["#ffffff", "#181818"])
def test_drawings_are_seen_on_light_and_on_dark_pages(colour, paper):
    darker, lighter = sorted((luminance(colour), luminance(paper)))
    assert (lighter + 0.05) / (darker + 0.05) >= 3


def trace_document() -> dict[str, object]:
    events: list[dict[str, object]] = []
    for rank in range(2):
        row = {"pid": rank, "tid": 0}
        events += [
            {"ph": "M", "name": "thread_name", **row, "args": {"name": "program"}},
            {"ph": "X", "cat": "op", "name": "<setup>", "ts": 0, "dur": 50, **row},
            {"ph": "i", "name": "end of step 1", "ts": 60, **row},
            {
                "ph": "X",
                "cat": "exchange",
                "name": "S0 -> S1",
                "ts": 70,
                "dur": 20,
                **row,
                "args": {"asked for at": "f:3"},
            },
            {"ph": "X", "cat": "wait", "name": "S0 -> S1", "ts": 75, "dur": 10, **row},
            {"ph": "i", "name": "end of step 2", "ts": 100, **row},
        ]
    events += [
        {"ph": "s", "id": 1, "name": "8 bytes", "ts": 71, "pid": 0, "tid": 0},
        {"ph": "f", "id": 1, "name": "8 bytes", "ts": 85, "pid": 1, "tid": 0},
        {"ph": "s", "id": 2, "name": "8 bytes", "ts": 71, "pid": 1, "tid": 0},
    ]
    other = {"program": ["train.py"], "ranks": 2, "date": "2026-11-23"}
    return {"traceEvents": events, "otherData": other}


def test_the_page_of_a_trace_draws_what_comes_after_the_first_step():
    page = trace_page(trace_document(), "exposed < all")
    assert page.count("<rect") == 4
    assert "&lt;setup&gt;" not in page
    assert re.findall(r">([\d.]+) ms</text>", page) == [
        "0",
        "0.005",
        "0.01",
        "0.015",
        "0.02",
        "0.025",
        "0.03",
        "0.035",
        "0.04",
    ]
    assert "asked for at f:3" in page
    assert page.count("<title>8 bytes</title>") == 1
    assert "exposed &lt; all" in page


@pytest.mark.extended
@pytest.mark.skipif(find_chromium() is None, reason="chromium is not installed")
def test_what_a_page_complains_of_is_seen(tmp_path):
    (tmp_path / "page.html").write_text("<p>held</p><script>console.error('a complaint')</script>")
    held, console = opened(tmp_path / "page.html", tmp_path)
    assert "<p>held</p>" in held
    assert ["a complaint" in line for line in console] == [True]


@pytest.mark.extended
@pytest.mark.skipif(find_chromium() is None, reason="chromium is not installed")
def test_a_browser_opens_both_pages_without_a_word(folder):
    assert CliRunner().invoke(main, ["bench", "report", str(folder)]).exit_code == 0
    (folder / "trace.html").write_text(trace_page(trace_document(), "summary"))
    for name, drawings in (("report", 8), ("trace", 1)):
        held, console = opened(folder / f"{name}.html", folder)
        assert console == []
        assert held.count("</svg>") == drawings
