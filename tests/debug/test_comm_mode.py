"""What CommDebugMode counts and for whom, and the pictures of who holds what."""

import importlib.util
import json
import re
from typing import Any

import pytest
import torch
from torch import nn

import tritondt as T
from tests.ops.sharded import distribute
from tritondt import debug, environment, events
from tritondt.comm.transports.threads import run_ranks
from tritondt.debug import CommDebugMode, sharding_html, sharding_text, visualize_sharding
from tritondt.errors import ArgumentError
from tritondt.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tritondt.sharding.placement import parse_placements

X = torch.ones(2, 8, 6)


class Model(nn.Module):
    """Two layers with a boundary each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 12), nn.Linear(12, 6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_mode_that_is_on_is_not_entered_again() -> None:
    """Its subscription would have been lost, and counted every step until the end of the process."""

    def body(rank: int) -> int:
        x = T.ones(4, device_mesh=T.Mesh((2,)), placements=[T.Shard(0)])
        with CommDebugMode() as comm:
            with pytest.raises(ArgumentError, match="a CommDebugMode was entered that is on already; make one"), comm:
                pass
            x.full_tensor()
        x.full_tensor()
        return comm.get_total_counts()

    assert run_ranks(2, body) == [1, 1]
    assert not events.subscribers


def test_one_mode_of_two_rank_threads_is_refused_for_one_of_them() -> None:
    comm = CommDebugMode()

    def body(rank: int) -> str:
        x = T.ones(4, device_mesh=T.Mesh((2,)), placements=[T.Shard(0)])
        try:
            with comm:
                x.full_tensor()  # waits for the other rank
        except ArgumentError:
            x.full_tensor()
            return "refused"
        return "counted"

    assert sorted(run_ranks(2, body)) == ["counted", "refused"]
    assert not events.subscribers


def parallel_model(mesh: T.Mesh) -> nn.Module:
    plan = {
        "layers.0": ColwiseParallel(),
        "layers.1": RowwiseParallel(output_layouts=T.Shard(1), use_local_output=False),
    }
    return parallelize_module(Model(), mesh, plan)


def test_every_step_counts_for_the_module_that_asked_for_it():
    def body(rank: int) -> None:
        mesh = T.Mesh((2,))
        model = parallel_model(mesh)
        x = distribute(X, mesh, "S1").requires_grad_()
        with CommDebugMode() as comm:
            found: Any = model(x)
            found.backward(distribute(X, mesh, "S1"))
            found.detach().redistribute(placements=[T.Replicate()])
        # Half of a tensor of 2 * 8 * 6 * 4 = 384 bytes goes to the other rank.
        counts = comm.by_module()
        assert counts["Model.layers.0"] == {"(S1) -> (R)": debug.Count(1, 1, 1, 192, 192)}
        assert counts["Model.layers.1"] == {"(P(sum)) -> (S1)": debug.Count(1, 1, 1, 192, 192)}
        assert counts["outside modules"] == {"(S1) -> (R)": debug.Count(1, 1, 1, 192, 192)}
        backward = counts["backward"]
        assert backward["(S1) -> (R)"] == backward["(P(sum)) -> (S1)"] == debug.Count(1, 1, 1, 192, 192)
        assert set(counts) == {"Model.layers.0", "Model.layers.1", "outside modules", "backward"}
        by_kind = comm.get_comm_counts()
        assert by_kind["(S1) -> (R)"] == 3
        assert by_kind["(P(sum)) -> (S1)"] == 2
        # The bias of the second layer has 6 elements.
        assert comm.get_total_counts() == sum(by_kind.values()) == 6
        assert comm.get_sent_bytes() == comm.get_received_bytes() == 5 * 192 + 24
        functional = torch.ops.c10d_functional
        assert by_kind[functional.all_gather_into_tensor] == by_kind["(S1) -> (R)"] == 3
        assert by_kind[functional.reduce_scatter_tensor] == 2
        assert by_kind[functional.all_reduce] == by_kind["(P(sum)) -> (R)"] == 1  # of the second layer's bias
        assert by_kind[torch.ops._dtensor.shard_dim_alltoall] == by_kind[functional.all_to_all_single] == 0
        parameters = comm.get_parameter_info()
        assert set(parameters) == {"Model", "Model.layers.0", "Model.layers.1"}
        assert list(parameters["Model.layers.1"]) == ["weight", "bias"]
        assert parameters["Model"]["layers.0.weight"].shape == (12, 6)
        assert comm.get_sharding_info()["Model.layers.1.weight"] == (T.Shard(1),)
        lines = str(comm).splitlines()
        assert lines[0].split() == [
            "module",
            "redistribution",
            "steps",
            "messages",
            "bytes",
            "sent",
            "bytes",
            "received",
        ]
        assert ["all", "6", "6", "984", "984"] in [line.split() for line in lines]
        assert any(line.split() == ["Model.layers.0", "(S1)", "->", "(R)", "1", "1", "192", "192"] for line in lines)
        written = json.loads(comm.to_json())
        assert written["total"] == {"steps": 6, "sent_bytes": 984, "received_bytes": 984}
        assert written["modules"]["Model.layers.0"]["(S1) -> (R)"]["sent_bytes"] == 192
        assert written["sharding"]["Model.layers.0.bias"] == "(S0)"

    run_ranks(2, body)


def test_nothing_counts_outside_and_nothing_is_left_behind():
    def body(rank: int) -> None:
        mesh = T.Mesh((2,))
        model = parallel_model(mesh)
        num_hooks = [len(layer._forward_hooks) for layer in model.modules()]
        comm = CommDebugMode()
        with comm:
            model(distribute(X, mesh, "S1"))
        total = comm.get_total_counts()
        model(distribute(X, mesh, "S1"))
        assert comm.get_total_counts() == total == 2
        assert [len(layer._forward_hooks) for layer in model.modules()] == num_hooks
        with comm:
            # Steps without messages do not count, and neither does what was there before.
            distribute(X, mesh, "R").redistribute(placements=[T.Shard(1)])
        assert comm.get_total_counts() == 0

    run_ranks(2, body)


def test_a_module_that_raises_has_ended():
    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError(x.shape)

    def body(rank: int) -> None:
        mesh = T.Mesh((2,))
        with CommDebugMode() as comm:
            with pytest.raises(ValueError, match=r"torch\.Size"):
                Failing()(X)
            distribute(X, mesh, "S1").full_tensor()
        assert list(comm.by_module()) == ["outside modules"]

    run_ranks(2, body)


def test_what_operators_moved_without_being_asked():
    def body(rank: int) -> None:
        mesh = T.Mesh((2,))
        with CommDebugMode() as comm:
            distribute(X[0], mesh, "S0") + distribute(X[0], mesh, "S1")
        ((op, kind), count), *rest = comm.get_implicit_counts().items()
        assert (op, count, rest) == ("aten.add.Tensor", 1, [])
        assert "(S1) of (8, 6) float32 -> (S0)" in kind or "(S0) of (8, 6) float32 -> (S1)" in kind
        assert f"not asked for by name: aten.add.Tensor moved {kind}, 1 times" in str(comm)
        assert json.loads(comm.to_json())["implicit"][0]["operator"] == "aten.add.Tensor"
        with debug.explicit_redistribution(), pytest.raises(T.ImplicitRedistributionError):
            distribute(X[0], mesh, "S0") + distribute(X[0], mesh, "S1")

    run_ranks(2, body)


def test_what_operators_move_and_complete_counts_for_them():
    def body(rank: int) -> None:
        mesh = T.Mesh((2,))
        with CommDebugMode() as comm:
            x: Any = distribute(X[0], mesh, "P").tanh()
            x.redistribute(placements=[T.Shard(1)]).softmax(1)
            distribute(X[0], mesh, "S0").redistribute(placements=[T.Shard(1)])
        found = comm.by_operator()
        # 48 terms of 4 bytes go to the other rank.
        assert found["aten.tanh.default"] == {"(P(sum)) -> (R)": debug.Count(1, 1, 1, 192, 192)}
        # Of each of 8 rows, the largest and the sum.
        assert found["aten._softmax.default"] == {"(S0) -> (R)": debug.Count(1, 1, 1, 64, 64)}
        assert found["redistribute"] == {"(S0) -> (S1)": debug.Count(1, 1, 1, 48, 48)}
        assert set(found) == {"aten.tanh.default", "aten._softmax.default", "redistribute"}
        assert "for redistribute: 1 steps, 48 bytes sent, 48 received" in str(comm)
        assert json.loads(comm.to_json())["operators"]["redistribute"]["(S0) -> (S1)"]["sent_bytes"] == 48

    run_ranks(2, body)


def test_what_operators_move_is_logged_where_asked_for(monkeypatch, caplog, capsys):
    def body(rank: int) -> None:
        mesh = T.Mesh((2,))
        x = distribute(X[0], mesh, "S0")
        x + distribute(X[0], mesh, "R")  # a local step
        x + distribute(X[0], mesh, "S1")
        x.redistribute(placements=[T.Replicate()])

    run_ranks(2, body)
    assert caplog.messages == []
    monkeypatch.setenv("TRITONDT_LOG", "1")
    run_ranks(2, body)
    assert len(caplog.messages) == 2
    told = r": aten\.add\.Tensor needs \(S1\) of \(8, 6\) float32 as \(S0\), which moves up to 48 bytes to a rank; "
    for rank, line in enumerate(sorted(caplog.messages)):
        assert re.fullmatch(rf"rank {rank}{told}called at .*test_comm_mode\.py:\d+", line)
    monkeypatch.setenv("TRITONDT_LOG", "all")
    with pytest.raises(T.WorldError, match="TRITONDT_LOG='all' is set; allowed are 0, 1, debug, info,"):
        run_ranks(1, lambda rank: environment.log_levels())


def picture(mesh_shape: tuple[int, ...], placements: str, shape: tuple[int, ...], order: Any = None) -> list[str]:
    def body(rank: int) -> str:
        meta = T.TensorMeta.contiguous(shape)
        return sharding_text(T.DTensorSpec(T.Mesh(mesh_shape), parse_placements(placements), meta, order))

    size = 1
    for length in mesh_shape:
        size *= length
    pictures = run_ranks(size, body)
    assert len(set(pictures)) == 1
    return [" ".join(line.split()) for line in pictures[0].splitlines()[1:] if not set(line) <= set("-+")]


@pytest.mark.parametrize(
    ("mesh_shape", "placements", "shape", "expected"),
    [
        ((3,), "S0", (7,), ["| 0-2 | 3-5 | 6", "ranks | 0 | 1 | 2"]),
        ((2,), "R", (4,), ["| 0-3", "ranks | 0, 1"]),
        ((2,), "P(max)", (4,), ["| 0-3", "ranks | 0 max 1"]),
        ((2,), "S0(repeats=2)", (4,), ["| 0 | 1 | 2 | 3", "ranks | 0 | 1 | 0 | 1"]),
        ((2,), "S0(sizes=0/3)", (3,), ["| 0-2", "ranks | 1"]),
        ((2,), "S0", (0,), ["ranks"]),
        ((2, 2), "S0, S1", (3, 4), ["| 0-1 | 2-3", "0-1 | 0 | 1", "2 | 2 | 3"]),
        ((2, 2), "S0, S0", (4, 3), ["| 0-2", "0 | 0", "1 | 1", "2 | 2", "3 | 3"]),
        ((2, 2), "P, S1", (3, 4), ["| 0-1 | 2-3", "0-2 | 0 + 2 | 1 + 3"]),
        ((2, 2), "P, R", (3, 4), ["| 0-3", "0-2 | 0, 1 + 2, 3"]),
    ],
)
def test_pictures(mesh_shape, placements, shape, expected):
    assert picture(mesh_shape, placements, shape) == expected


def test_a_picture_of_another_cut_order():
    assert picture((2, 2), "S0, S0", (4,), order=(1, 0)) == ["| 0 | 1 | 2 | 3", "ranks | 0 | 2 | 1 | 3"]


def test_one_rank_prints(capsys):
    def body(rank: int) -> None:
        mesh = T.Mesh((2,))
        visualize_sharding(distribute(torch.ones(2, 3), mesh, "S0"), header="weights")
        with pytest.raises(T.LayoutError, match=r"of a tensor of 1 or 2 dims, .* has 3; take a slice of it"):
            visualize_sharding(distribute(torch.ones(2, 3, 4), mesh, "S0"))

    run_ranks(2, body)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["weights", "(S0) of (2, 3) float32 on Mesh(2 over ranks 0..1, cpu)"]
    assert [line.split() for line in lines[2:]] == [
        ["|", "0-2"],
        ["--+----"],
        ["0", "|", "0"],
        ["--+----"],
        ["1", "|", "1"],
    ]


def test_a_picture_by_rich_has_the_same_cells(capsys):
    pytest.importorskip("rich")

    def body(rank: int) -> None:
        visualize_sharding(distribute(torch.ones(2, 3), T.Mesh((2,)), "S0"), header="weights", use_rich=True)

    run_ranks(2, body)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "(S0) of (2, 3) float32 on Mesh(2 over ranks 0..1, cpu)"
    assert lines[1].strip() == "weights"
    cells = [[cell.strip() for cell in re.split("[|\u2502\u2503]", line)[1:-1]] for line in lines[2:]]
    assert [row for row in cells if row] == [["", "0-2"], ["0", "0"], ["1", "1"]]


def test_without_rich_a_picture_is_plain_text_and_says_so(capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)

    def body(rank: int) -> None:
        visualize_sharding(distribute(torch.ones(4), T.Mesh((2,)), "S0"), use_rich=True)

    run_ranks(2, body)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].split() == ["ranks", "|", "0", "|", "1"]
    assert lines[-1] == "(plain text: rich is not installed; pip install rich)"


def test_counts_and_explanations_are_tables_of_notebooks():
    def body(rank: int) -> tuple[str, str, str]:
        x = distribute(torch.ones(4, 4), T.Mesh((2,)), "S0")
        with CommDebugMode() as comm:
            x.redistribute(placements=[T.Shard(1)])
        same = T.explain(x._spec, x._spec.with_placements([T.Shard(1)]))
        assert T.explain(x, [T.Shard(1)]) == same
        assert T.explain(x, [T.Shard(-1)]) == same
        with pytest.raises(
            T.LocalTensorError, match=r"given a Tensor of shape \(2,\), which has no placements; allowed"
        ):
            T.explain(torch.ones(2), [T.Shard(0)])
        return comm._repr_html_(), same._repr_html_(), T.explain(x, [T.Shard(0)])._repr_html_()

    counts, steps, nothing = run_ranks(2, body)[0]
    assert [set(re.findall(r"text-align: (\w+)[^>]*>16<", html)) for html in (counts, steps)] == [{"right"}] * 2
    assert re.findall(r"text-align: (\w+)[^>]*>exchange<", steps) == ["left"]
    counts, steps = (re.sub(' style="[^"]*"', "", html) for html in (counts, steps))
    assert "<td>(S0) -&gt; (S1)</td><td>1</td><td>1</td><td>16</td>" in counts
    assert counts.startswith("<table><caption>redistributions of this rank</caption><tr><th>module</th>")
    assert "<p>for redistribute: 1 steps, 16 bytes sent, 16 received</p>" in counts
    assert "<caption>(S0) -&gt; (S1) of (4, 4) at (0,)</caption>" in steps
    assert "<td>exchange</td><td>(S0)</td><td>(S1)</td><td>1</td><td>16</td>" in steps
    assert nothing.endswith(": nothing to do</p>")


def test_html_has_the_cells_of_the_picture_in_a_colour_for_each_holder():
    def body(rank: int) -> str:
        spec = T.DTensorSpec(T.Mesh((2, 2)), parse_placements("S0,S1"), T.TensorMeta.contiguous((3, 4)))
        with pytest.raises(T.LayoutError, match="has 3; take a slice of it"):
            sharding_html(T.DTensorSpec(T.Mesh((2, 2)), parse_placements("S0,R"), T.TensorMeta.contiguous((2, 2, 2))))
        return sharding_html(spec)

    html, *others = run_ranks(4, body)
    assert others == [html] * 3
    cells = re.findall(r'<td style="background: (#[0-9a-f]+);[^>]*>([^<]*)</td>', html)
    assert [text for _, text in cells] == ["0", "1", "2", "3"]
    assert len({colour for colour, _ in cells}) == 4
    assert "<th>0-1</th>" in html
    assert re.search('<caption style="[^"]*white-space: nowrap', html)


def test_what_was_issued_is_counted_once_where_it_runs_beside_another_step():
    def body(rank: int) -> None:
        mesh = T.Mesh((3,))
        x, y = (T.DTensor.from_local(torch.ones(2, size), mesh, [T.Shard(0)]) for size in (50, 7))
        with CommDebugMode() as comm:
            pending = x.redistribute(placements=[T.Replicate()], async_op=True)
            y.redistribute(placements=[T.Replicate()])
            pending.to_local().sum()
        assert comm.get_received_bytes() == 2 * 2 * (50 + 7) * 4

    run_ranks(3, body)
