"""Pages of benchmarks and plans, and pictures of traces: drawn, refused, and opened by a browser without complaint."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.harness.chromium import find_chromium, opened
from tritondt.cli.bench import page as report_page
from tritondt.cli.bench.page import points_of
from tritondt.cli.charts import COLOURS, Series, histogram, line_chart, matplotlib
from tritondt.cli.main import main
from tritondt.cli.trace.picture import write_summary

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
    # One of bandwidths, of latencies and of ratios, twice; 9 iterations are too few for histograms.
    assert page.count("<svg") == page.count("</svg>") == 6
    assert "Times of iterations" not in page
    assert "all_reduce on 2 ranks (a.json)" in page
    assert "redistribute on 4 ranks (b.json)" in page
    assert "platform &lt;Linux&gt;, processor a &amp; b" in page
    assert "partial: rank 1 &lt;stopped&gt;" in page
    assert "other.json: " in page
    labels = re.findall(r'aria-label="([^"]*)"', page)
    assert labels[:3] == [f"float sum out of place: {name} over bytes" for name in ("GB/s", "us", "ratio")]
    assert page.count(">bytes</text>") == 6
    # What is wrong, or unchecked, is in the table alone.
    assert page.count('class="wrong"><td>') == 1
    assert "<td>N/A</td>" in page
    assert not re.search(r"(src|href)=[\"'](?!data:|#)|https?://|@import|<script", page), "it asks the network"


@pytest.fixture
def drawn(monkeypatch):
    """Records the charts that are asked for, and draws none."""
    found: list[tuple[str, dict[str, object]]] = []

    def line_chart(title, y_label, series, x_text, reference=None):
        found.append((y_label, {each.name: list(each.points) for each in series if each.points}))
        return ""

    def histogram(title, x_label, values, styles):
        found.append((title, values))
        return ""

    monkeypatch.setattr(report_page, "line_chart", line_chart)
    monkeypatch.setattr(report_page, "histogram", histogram)
    return found


def test_right_results_alone_are_drawn(drawn, tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(collective()))
    assert CliRunner().invoke(main, ["bench", "report", str(tmp_path)]).exit_code == 0
    (_, bandwidths), (_, latencies), (_, ratios) = drawn
    assert {side: [x for x, _ in points] for side, points in bandwidths.items()} == {
        "tritondt": [1 << 10, 1 << 20],
        "torch": [1 << 10],
    }
    assert latencies["torch"] == [(1 << 10, pytest.approx(40 * 1.4))]
    assert ratios == {"tritondt": [(1 << 10, 0.5)]}


def test_histograms_are_drawn_of_thirty_iterations_and_more(drawn, tmp_path):
    results = [result(side, 1 << 10, 20.0) for side in ("tritondt", "torch")]
    results[0]["out_of_place_per_iter"] = iterations(*range(1, 31))
    (tmp_path / "a.json").write_text(json.dumps(collective(results=results)))
    assert CliRunner().invoke(main, ["bench", "report", str(tmp_path)]).exit_code == 0
    title, values = drawn[-1]
    assert title == "1K float sum out of place"
    assert {side: len(times) for side, times in values.items()} == {"tritondt": 30}


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
    assert line_chart("a", "GB/s", [Series("b", [(4, 0.5)], 0, [0.5])], str).count("<svg") == 1
    assert line_chart("a", "x", [], str) == line_chart("a", "x", [Series("b", [], 0)], str) == ""
    equal = histogram("a", "ms", {"b": [1.0, 1.0], "c": [0.0]}, {"b": 0, "c": 1})
    assert all(f">{name}</text>" in equal for name in ("b", "c", "ms", "iterations"))
    assert histogram("a", "ms", {"b": [0.0]}, {"b": 0}).count("<svg") == 1


def test_names_in_charts_are_text_and_no_formula():
    drawn = line_chart("$x^2$ <b> \x1b[31m 層", "GB/s", [Series("b", [(4, 1.0), (8, 3.0)], 0)], str)
    assert ">$x^2$ &lt;b&gt; \\x1b[31m 層</text>" in drawn


def luminance(colour: str) -> float:
    """Relative luminance, as the accessibility guidelines for the web (WCAG) define it."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_lines_are_seen_on_the_white_of_charts():
    assert all((1 + 0.05) / (luminance(colour) + 0.05) >= 3 for colour in COLOURS)


def trace_summary(num_steps: int = 3) -> dict[str, object]:
    step = [{"rank": rank, "duration_s": 0.02, "communication_s": 0.01, "exposed_s": 0.004} for rank in range(2)]
    cost = {"description": "(S0) -> (S1) of $x$", "asked_for_at": "train.py:7", "exchanges": 3, "sent_bytes": 4096}
    cost |= {"total_s": 0.01, "exposed_s": 0.004, "late_s": 0.0, "explanation": "", "suggestion": "issue it early"}
    summary = {"steps": [step] * num_steps, "redistributions": [cost] * 7 * bool(num_steps)}
    return {"program": ["train.py"], "ranks": 2, "date": "2026-11-23", "summary": summary}


@pytest.mark.parametrize(
    ("ending", "start"), [(".png", b"\x89PNG"), pytest.param(".pdf", b"%PDF", marks=pytest.mark.extended)]
)
@pytest.mark.parametrize("num_steps", [3, pytest.param(0, marks=pytest.mark.extended)])
def test_the_summary_of_a_trace_is_one_page(tmp_path, ending, start, num_steps):
    path = tmp_path / f"summary{ending}"
    write_summary(path, trace_summary(num_steps))
    assert path.read_bytes().startswith(start)


def test_the_page_of_a_trace_has_the_steps_after_the_first_and_what_costs_most(tmp_path):
    path = tmp_path / "summary.svg"
    with matplotlib().rc_context({"svg.fonttype": "none"}):
        write_summary(path, trace_summary())
    text = path.read_text()
    assert "train.py on 2 ranks, 2026-11-23" in text
    assert "mean of the ranks, each step after the first" in text
    assert text.count("(S0) -&gt; (S1) of $x$, asked for at train.py:7") == 5
    assert text.count("3 exchanges, 4,096 bytes: issue it early") == 5


@pytest.mark.extended
@pytest.mark.skipif(find_chromium() is None, reason="chromium is not installed")
def test_what_a_page_complains_of_is_seen(tmp_path):
    (tmp_path / "page.html").write_text("<p>held</p><script>console.error('a complaint')</script>")
    held, console = opened(tmp_path / "page.html", tmp_path)
    assert "<p>held</p>" in held
    assert ["a complaint" in line for line in console] == [True]


@pytest.mark.extended
@pytest.mark.skipif(find_chromium() is None, reason="chromium is not installed")
def test_a_browser_opens_the_report_without_a_word(folder):
    assert CliRunner().invoke(main, ["bench", "report", str(folder)]).exit_code == 0
    held, console = opened(folder / "report.html", folder)
    assert console == []
    assert held.count("</svg>") == 6


def test_what_ran_beside_a_compute_has_a_chart(tmp_path):
    found: Any = collective()
    found["results"][0]["overlap"] = {"alone_us": 100.0, "compute_us": 300.0, "both_us": 320.0, "share": 0.8}
    (tmp_path / "a.json").write_text(json.dumps(found))
    assert [point.beside for point in points_of(found) if point.beside is not None] == [0.8]
    assert CliRunner().invoke(main, ["bench", "report", str(tmp_path)]).exit_code == 0
    page = (tmp_path / "report.html").read_text()
    assert "Time beside a compute / both in turn, by medians; below 1 they overlap" in page
    assert page.count("<svg") == 4
