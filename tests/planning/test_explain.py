"""What explain says is what runs: bytes and messages of every step, on every rank."""

import json
from collections import defaultdict

import pytest
import torch

import tritondt as T
from tests.harness.oracle.cases import Case, failure_text, inputs_of, random_case
from tritondt import events, identity
from tritondt.comm.transports.threads import run_ranks
from tritondt.planning.alignment import NCCL_ALIGNMENT
from tritondt.planning.cost import CostTable
from tritondt.planning.explain import explain_layouts
from tritondt.sharding.layout import Layout
from tritondt.sharding.placement import parse_placements

WORLD_SIZE = 8
CASES_PER_TEST = 100

Report = tuple[str, int, int, int, int]


def specs_of(case: Case) -> tuple[T.DTensorSpec, T.DTensorSpec]:
    mesh, meta = T.Mesh(case.mesh_shape, ranks=case.ranks), T.TensorMeta.contiguous(case.shape, case.torch_dtype)
    return (
        T.DTensorSpec(mesh, T.parse_placements(case.source), meta, case.source_order),
        T.DTensorSpec(mesh, T.parse_placements(case.target), meta, case.target_order),
    )


@pytest.mark.parametrize("chunk", range(2))
def test_explain_agrees_with_what_ran(chunk: int) -> None:
    seeds = range(300_000 + chunk * CASES_PER_TEST, 300_000 + (chunk + 1) * CASES_PER_TEST)
    cases = [random_case(seed, WORLD_SIZE) for seed in seeds]
    ran: dict[int, list[Report]] = defaultdict(list)

    def note(event: events.StepRan) -> None:
        report = event.kind, event.sent_bytes, event.received_bytes, event.num_sent, event.num_received
        ran[identity.current().rank].append(report)

    def body(rank: int) -> None:
        for case in cases:
            source, target = specs_of(case)
            if source.mesh.coordinate is None:
                continue
            local = inputs_of(case).locals[source.mesh.coordinate]
            ran[rank].clear()
            T.redistribute(local, source, target)
            found = T.explain(source, target)
            explained = [
                (step.kind, step.sent_bytes, step.received_bytes, step.num_sent, step.num_received)
                for step in found.steps
            ]
            assert explained == ran[rank], failure_text(case)
            assert found.messages == sum(report[3] for report in explained), failure_text(case)

    unsubscribe = events.subscribe(note)
    try:
        run_ranks(WORLD_SIZE, body)
    finally:
        unsubscribe()


def test_json_has_every_step_and_the_totals() -> None:
    source, target = (T.Layout((4,), T.parse_placements(text), (8, 4)) for text in ("P", "R"))
    found = explain_layouts(source, target, 4, CostTable(), (1,))
    fields = json.loads(found.to_json())
    assert [step["kind"] for step in fields["steps"]] == ["reduce", "gather"]
    assert fields["sent_bytes"] == sum(step["sent_bytes"] for step in fields["steps"]) == found.sent_bytes == 192
    assert fields["received_bytes"] == found.received_bytes == 192
    assert fields["messages"] == found.messages == 6
    assert fields["coordinate"] == [1]
    assert fields["peak_bytes"] == found.peak_bytes
    assert fields["seconds"] == pytest.approx(found.seconds)


def test_table_names_steps_bytes_and_memory() -> None:
    source, target = (T.Layout((4,), T.parse_placements(text), (8, 4)) for text in ("S0", "S1"))
    table = str(explain_layouts(source, target, 4, CostTable()))
    assert "(S0) -> (S1) of (8, 4) at (0,)" in table
    assert "exchange" in table
    assert "bytes out" in table
    assert "peak temporary 24 bytes; 3 peers" in table


def test_nothing_to_do_says_so() -> None:
    layout = T.Layout((2,), (T.Shard(0),), (3,))
    found = explain_layouts(layout, layout, 4, CostTable())
    assert found.steps == ()
    assert found.seconds == 0.0
    assert "nothing to do" in str(found)


def test_explain_moves_nothing() -> None:
    """It is no collective: one rank may ask alone."""

    def body(rank: int) -> int:
        mesh, meta = T.Mesh((3,)), T.TensorMeta.contiguous((7,), torch.int8)
        source, target = (T.DTensorSpec(mesh, T.parse_placements(text), meta) for text in ("S0", "R"))
        return T.explain(source, target).received_bytes if rank == 1 else 0

    assert run_ranks(3, body) == [0, 4, 0]


def test_a_plot_has_the_bytes_of_every_step(tmp_path):
    pytest.importorskip("matplotlib")
    source, target = (Layout((4,), T.parse_placements(text), (8, 4)) for text in ("P", "R"))
    found = explain_layouts(source, target, 4, CostTable())
    figure = found.plot()
    (axes,) = figure.axes
    heights = [round(bar.get_height()) for bar in axes.patches]
    assert len(found.steps) == 2
    assert heights[:2] == [step.sent_bytes for step in found.steps]
    assert heights[2:4] == [step.received_bytes for step in found.steps]
    assert axes.get_title() == "(P(sum)) -> (R) of (8, 4) at (0,)"
    figure.savefig(tmp_path / "plot.png")
    (legend,) = figure.legends
    assert legend.get_window_extent().x0 >= axes.get_window_extent().x1, "it hides bars"
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_a_plot_without_matplotlib_says_what_to_install(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(name)

    source, target = (Layout((2,), T.parse_placements(text), (8, 4)) for text in ("S0", "R"))
    monkeypatch.setattr("tritondt.planning.step_chart.importlib.import_module", missing)
    with pytest.raises(ImportError, match="needs matplotlib, which is not installed: pip install matplotlib"):
        explain_layouts(source, target, 4, CostTable()).plot()


@pytest.mark.parametrize(("shape", "num_bytes"), [((4097, 4099), 3 * 2 * 1024 * 4099), ((4096, 4096), 0)])
def test_explain_tells_what_is_packed_for_alignment(shape: tuple[int, int], num_bytes: int) -> None:
    """Rows of 4099 bfloat16: the rank's own are aligned, and those of three others land between multiples of 16."""
    source, target = (Layout((4,), T.parse_placements(text), shape) for text in ("S0", "R"))
    dense = explain_layouts(source, target, 2, CostTable(), (0,))
    found = explain_layouts(source, target, 2, CostTable(), (0,), alignment=NCCL_ALIGNMENT)
    (step,) = found.steps
    assert step.aligned_bytes == step.staged_bytes == num_bytes
    assert (dense.steps[0].aligned_bytes, dense.steps[0].staged_bytes) == (0, 0)
    assert found.received_bytes == dense.received_bytes
    line = f"{num_bytes:,} temporary bytes are for alignment: of messages that start between multiples of 16 bytes"
    assert (line in str(found)) == (num_bytes > 0)
    assert "alignment" not in str(dense)


def test_bytes_by_kind_of_link() -> None:
    source, target = (Layout((4,), parse_placements(text), (8, 2)) for text in ("S0", "R"))
    found = explain_layouts(source, target, 4, CostTable(), (1,), hosts=(0, 0, 1, 1))
    assert (found.received_bytes, found.far_bytes, found.between_hosts) == (48, 16, ((0, 1, 32), (1, 0, 32)))
    assert str(found).splitlines()[-2:] == [
        "16 bytes come in from other hosts, 32 from this one",
        "between hosts 64 bytes of all ranks: 32 from host 0 to 1, 32 from host 1 to 0",
    ]
    assert explain_layouts(source, target, 4, CostTable()).between_hosts == ()
