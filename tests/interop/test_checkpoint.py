"""Checkpoints and state dicts of distributed tensors by torch's own tools: saved on one layout, read on any other."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.testing import assert_close

import tritondt as T
from tests.harness.gloo_ranks import GlooRanks
from tritondt import events
from tritondt._importing import when_imported
from tritondt.comm.transports.threads import run_ranks
from tritondt.interop import checkpoint
from tritondt.ops import set_fallback
from tritondt.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

# Shape and dtype of each tensor; elements are their own numbers, so that a wrong place shows.
TENSORS = {
    "matrix": ((17, 6), torch.float32),
    "vector": ((5,), torch.bfloat16),
    "scalar": ((), torch.float64),
    "empty": ((0, 3), torch.float32),
    "numbers": ((24, 2), torch.int64),
}
# Mesh, its ranks, and the placements of each tensor in order.
LAYOUTS = {
    "rows": ((4,), None, ("S0", "S0", "R", "S1", "S0(repeats=3)")),
    "plane": ((2, 2), None, ("S0, S1", "R, S0", "R, R", "R, S0", "S0, S0")),
    "pinned": ((2, 2), None, ("S1, S1", "S0(sizes=4/1), R", "R, R", "S0, S0", "S0(unit=6), S1")),
    "three": ((3,), (2, 0, 1), ("S0(sizes=9/0/8)", "S0", "R", "R", "S0(repeats=4)")),
}


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[GlooRanks]:
    with GlooRanks(4) as ranks:
        yield ranks


def whole(name: str, offset: int = 0) -> torch.Tensor:
    shape, dtype = TENSORS[name]
    return (torch.arange(torch.Size(shape).numel()) + offset).reshape(shape).to(dtype)


def cut(tensor: torch.Tensor, mesh: T.Mesh, placements: str) -> T.DTensor:
    return T.distribute_tensor(tensor, mesh, T.parse_placements(placements), src_data_rank=None)


def state(layout: str, offset: int = 0) -> dict[str, Any]:
    mesh_shape, mesh_ranks, placements = LAYOUTS[layout]
    mesh = T.Mesh(mesh_shape, ranks=mesh_ranks)
    named = zip(TENSORS, placements, strict=True)
    return {"nested": {name: cut(whole(name, offset), mesh, text) for name, text in named}, "step": 3}


def save(rank: int, layout: str, folder: str, is_async: bool) -> None:
    with set_fallback("replicate"):  # under which one rank's shard was once written as the whole
        _save(layout, folder, is_async)


def _save(layout: str, folder: str, is_async: bool) -> None:
    if is_async:
        future: Any = dcp.async_save(state(layout), checkpoint_id=folder)
        future.result()
    else:
        dcp.save(state(layout), checkpoint_id=folder)


def load(rank: int, layout: str, folder: str) -> dict[str, torch.Tensor]:
    """What every rank holds once it has loaded: values that were there before are others."""
    found = state(layout, 100)
    versions = {name: tensor._version for name, tensor in found["nested"].items()}
    dcp.load(found, checkpoint_id=folder)
    for name, tensor in found["nested"].items():
        is_here = tensor._spec.coordinate is not None and tensor.to_local().numel() > 0
        assert tensor._version > versions[name] or not is_here, name
    return {name: tensor.full_tensor() for name, tensor in found["nested"].items()}


@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", LAYOUTS)
def test_saved_on_one_layout_and_read_on_another(
    four_ranks: GlooRanks, tmp_path: Path, source: str, target: str
) -> None:
    four_ranks.run(save, source, str(tmp_path), False)
    for rank, found in enumerate(four_ranks.run(load, target, str(tmp_path))):
        if rank < 3 or target != "three":
            for name, tensor in found.items():
                assert_close(tensor, whole(name), rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_read_by_one_process_as_plain_tensors(four_ranks: GlooRanks, tmp_path: Path) -> None:
    four_ranks.run(save, "rows", str(tmp_path), True)
    found: dict[str, Any] = {"nested": {name: whole(name, 100) for name in TENSORS}, "step": 0}
    dcp.load(found, checkpoint_id=str(tmp_path), no_dist=True)
    assert found["step"] == 3
    for name in TENSORS:
        assert_close(found["nested"][name], whole(name), rtol=0, atol=0)


def save_terms(rank: int, folder: str) -> str:
    terms = T.DTensor.from_local(torch.ones(3), T.Mesh((4,)), [T.Partial()])
    with pytest.raises((T.LayoutError, dcp.api.CheckpointException)) as raised:
        dcp.save({"terms": terms}, checkpoint_id=folder)
    return str(raised.value)


def test_terms_are_refused(four_ranks: GlooRanks, tmp_path: Path) -> None:
    for text in four_ranks.run(save_terms, str(tmp_path)):
        assert "a rank holds a term of each element there, not its value; redistribute to Shard or Replicate" in text
    assert not list(tmp_path.glob("*.distcp"))


def net(offset: int = 0) -> nn.Module:
    torch.manual_seed(7 + offset)
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3))


PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def trained(offset: int = 0) -> tuple[Any, torch.optim.Optimizer]:
    """A module over three of the ranks' columns, none of which divide, with an optimizer that has taken a step."""
    made = parallelize_module(net(offset), T.Mesh((4,)), PLAN)
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.1)
    made(torch.arange(12.0).reshape(2, 6)).sum().backward()
    optimizer.step()
    return made, optimizer


def whole_states(rank: int, cpu_offload: bool) -> tuple[Any, Any, dict[str, torch.Tensor], int]:
    """Whole states of model and optimizer, the whole parameters, and the bytes that the states brought to this rank."""
    made, optimizer = trained()
    options = StateDictOptions(full_state_dict=True, cpu_offload=cpu_offload)
    expected = {name: parameter.detach().full_tensor() for name, parameter in made.named_parameters()}
    steps: list[events.StepRan] = []
    unsubscribe = events.subscribe(steps.append)
    found = torch_state_dict.get_state_dict(made, optimizer, options=options)
    unsubscribe()
    return *found, expected, sum(step.received_bytes for step in steps)


@pytest.mark.parametrize("cpu_offload", [False, True])
def test_a_full_state_dict_has_whole_tensors(four_ranks: GlooRanks, cpu_offload: bool) -> None:
    for rank, (of_model, of_optimizer, expected, received) in enumerate(four_ranks.run(whole_states, cpu_offload)):
        if cpu_offload and rank > 0:
            assert of_model == {}
            assert received == 0
            continue
        assert received > 0
        assert of_model.keys() == expected.keys()
        for name, tensor in of_model.items():
            assert type(tensor) is torch.Tensor
            assert_close(tensor, expected[name], rtol=0, atol=0)
            moment = of_optimizer["state"][name]["exp_avg"]
            assert type(moment) is torch.Tensor
            assert moment.shape == tensor.shape


WANTED = {"rows": ((), (1,), (3, 0)), "three": ((0, 3), (3,))}  # rank 3 is in none but the first


def gathered_on_some(rank: int, layout: str, wanted: tuple[int, ...]) -> dict[str, Any]:
    return torch_state_dict._gather_state_dict(state(layout), cpu_offload=True, ranks_only=wanted)


@pytest.mark.parametrize(("layout", "wanted"), [(layout, each) for layout, all_ in WANTED.items() for each in all_])
def test_whole_tensors_on_the_ranks_that_want_them(four_ranks: GlooRanks, layout: str, wanted: tuple[int, ...]) -> None:
    """Of meshes with some, all or none of these ranks; a rank outside has an empty tensor."""
    for rank, found in enumerate(four_ranks.run(gathered_on_some, layout, wanted)):
        if wanted and rank not in wanted:
            assert not found
            continue
        for name, tensor in found["nested"].items():
            expected = whole(name) if layout == "rows" or rank < 3 else torch.empty(0, dtype=whole(name).dtype)
            assert_close(tensor, expected, rtol=0, atol=0)


def set_again(rank: int, broadcast: bool) -> None:
    made, optimizer = trained()
    options = StateDictOptions(full_state_dict=True, cpu_offload=broadcast)
    of_model, of_optimizer = torch_state_dict.get_state_dict(made, optimizer, options=options)
    other, its_optimizer = trained(1)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    torch_state_dict.set_model_state_dict(other, of_model, options=options)
    torch_state_dict.set_optimizer_state_dict(other, its_optimizer, of_optimizer, options=options)
    for ours, theirs in zip(made.parameters(), other.parameters(), strict=True):
        assert isinstance(theirs, T.DTensor)
        assert ours._spec is theirs._spec
        assert_close(theirs.to_local(), ours.to_local(), rtol=0, atol=0)
        moments = optimizer.state[ours]["exp_avg"], its_optimizer.state[theirs]["exp_avg"]
        assert isinstance(moments[1], T.DTensor)
        assert_close(moments[1].to_local(), moments[0].to_local(), rtol=0, atol=0)


@pytest.mark.parametrize("broadcast", [False, True])
def test_a_full_state_dict_is_cut_again(four_ranks: GlooRanks, broadcast: bool) -> None:
    four_ranks.run(set_again, broadcast)


ON_ALL_RANKS = ("rows", "plane", "pinned")  # and from rank 0 on: it sends every rank its part
LAYOUTS_OF_STATES = {**LAYOUTS, "turned": ((4,), (1, 0, 3, 2), LAYOUTS["rows"][2])}


def set_from_rank_0(rank: int, layout: str) -> tuple[dict[str, torch.Tensor], int]:
    """Whole tensors as rank 0 has set them, which differ from those before, and how many it sent by parts."""
    mesh_shape, mesh_ranks, placements = LAYOUTS_OF_STATES[layout]
    mesh = T.Mesh(mesh_shape, ranks=mesh_ranks)
    names = [name for name in TENSORS if name != "scalar"]  # torch sends it as an object
    texts = dict(zip(TENSORS, placements, strict=True))
    found: dict[str, Any] = {name: cut(whole(name, 100), mesh, texts[name]) for name in names}
    before = {name: tensor._spec for name, tensor in found.items()}
    given = {name: whole(name) for name in names} if rank == 0 else {}
    if rank == 0:
        given["matrix"] = given["matrix"].t().contiguous().t()
    steps: list[events.StepRan] = []
    unsubscribe = events.subscribe(steps.append)
    torch_state_dict._broadcast_state_dict(given, found, torch.device("cpu"))
    unsubscribe()
    assert {name: tensor._spec for name, tensor in found.items()} == before
    return {name: tensor.full_tensor() for name, tensor in found.items()}, [each.kind for each in steps].count("send")


@pytest.mark.parametrize("layout", LAYOUTS_OF_STATES)
def test_a_full_state_dict_of_rank_0(four_ranks: GlooRanks, layout: str) -> None:
    for rank, (found, num_sent) in enumerate(four_ranks.run(set_from_rank_0, layout)):
        assert num_sent == (len(found) if layout in ON_ALL_RANKS else 0)
        if rank < 3 or layout != "three":
            for name, tensor in found.items():
                assert_close(tensor, whole(name), rtol=0, atol=0)


def set_where_a_rank_differs(rank: int, has_plain: bool) -> Any:
    found: dict[str, Any] = {"matrix": state("rows", 100)["nested"]["matrix"]}
    if rank == 2:
        found = {"matrix": torch.zeros(17, 6)} if has_plain else {}
    torch_state_dict._broadcast_state_dict({"matrix": whole("matrix")} if rank == 0 else {}, found, torch.device("cpu"))
    if rank == 2:
        return found.get("matrix")
    assert_close(found["matrix"].to_local(), cut(whole("matrix"), T.Mesh((4,)), "S0").to_local(), rtol=0, atol=0)
    return found["matrix"]._spec.placements


@pytest.mark.parametrize("has_plain", [False, True])
def test_a_tensor_that_one_rank_has_not_or_whole(four_ranks: GlooRanks, has_plain: bool) -> None:
    found = four_ranks.run(set_where_a_rank_differs, has_plain)
    assert found[0] == found[1] == found[3] == (T.Shard(0),)
    if has_plain:
        assert_close(found[2], whole("matrix"), rtol=0, atol=0)
    else:
        assert found[2] is None


GIVEN_WRONG = {
    "distributed": lambda x: cut(x, T.Mesh((4,), ranks=[3, 2, 1, 0]), "S0"),
    "sparse": lambda x: x.to_sparse(),
    "meta": lambda x: x.to("meta"),
}


def refused_from_rank_0(rank: int, kind: str) -> str:
    found: dict[str, Any] = {"matrix": state("rows")["nested"]["matrix"]}
    wrong = GIVEN_WRONG[kind](whole("matrix"))
    with pytest.raises(T.TritondtError) as raised:
        torch_state_dict._broadcast_state_dict({"matrix": wrong} if rank == 0 else {}, found, torch.device("cpu"))
    torch_state_dict._broadcast_state_dict({"matrix": whole("matrix", 7)}, found, torch.device("cpu"))
    assert_close(found["matrix"].full_tensor(), whole("matrix", 7), rtol=0, atol=0)
    return f"{type(raised.value).__name__}: {raised.value}"


@pytest.mark.in_core(1)
@pytest.mark.parametrize("kind", GIVEN_WRONG)
def test_what_rank_0_cannot_send_all_hear_and_go_on(four_ranks: GlooRanks, kind: str) -> None:
    first, *others = four_ranks.run(refused_from_rank_0, kind)
    assert "memory" in first if kind == "meta" else "broadcast_from_rank0" in first
    for other in others:
        assert other.startswith("RefusalError"), other
        assert first.partition(": ")[2] in other


def continued(rank: int, folder: str) -> None:
    """Training goes on bit for bit from a checkpoint of model and optimizer."""
    made, optimizer = trained()
    of_model, of_optimizer = torch_state_dict.get_state_dict(made, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)
    other, its_optimizer = trained(1)
    of_model, of_optimizer = torch_state_dict.get_state_dict(other, its_optimizer)
    dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)
    torch_state_dict.set_state_dict(other, its_optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
    for module, its in ((made, optimizer), (other, its_optimizer)):
        its.zero_grad()
        module(torch.arange(12.0).reshape(2, 6) * 2).sum().backward()
        its.step()
    for ours, theirs in zip(made.parameters(), other.parameters(), strict=True):
        assert_close(theirs.to_local(), ours.to_local(), rtol=0, atol=0)


def test_training_goes_on_bit_for_bit(four_ranks: GlooRanks, tmp_path: Path) -> None:
    four_ranks.run(continued, str(tmp_path))


def test_chunks_are_the_boxes_of_a_rank() -> None:
    def body(rank: int) -> list[tuple[Any, ...]]:
        x = cut(torch.arange(8), T.Mesh((2,)), "S0(repeats=2)")
        return [(tuple(chunk.offsets), x.to_local()[chunk.local].tolist()) for chunk in checkpoint.chunks(x._spec)]

    assert run_ranks(2, body) == [
        [((0,), [0, 1]), ((4,), [4, 5])],
        [((2,), [2, 3]), ((6,), [6, 7])],
    ]


def test_a_module_is_added_to_when_it_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_later.py").write_text("from math import pi\nnumber = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[int] = []
    when_imported("imported_later", lambda module: seen.append(module.number))
    assert seen == []
    imported_later = importlib.import_module("imported_later")

    assert seen == [1]
    when_imported("imported_later", lambda module: seen.append(module.number))
    assert seen == [1, 1]
    assert type(imported_later.__loader__).__name__ == "SourceFileLoader"
    sys.modules.pop("imported_later")
    assert not any(type(finder).__name__ == "_Finder" and finder.name == "imported_later" for finder in sys.meta_path)  # type: ignore[attr-defined]
