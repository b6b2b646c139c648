"""find_plan by itself: choices against all there are, refusals with their sentences, and no memory taken."""

import logging
import re
import sys
from collections import OrderedDict
from io import StringIO
from itertools import combinations
from random import Random
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tritondt as T
from tests.found_plan.models import Llama, NormLast, Running
from tritondt.comm.transports.threads import run_ranks
from tritondt.errors import ArgumentError, MeshError, ParallelizeError, was_told
from tritondt.found_plan import FoundPlan, find_mesh, find_plan
from tritondt.found_plan.candidates import Candidate
from tritondt.found_plan.search import Chosen, Cost, Priced, frontier
from tritondt.found_plan.stand_in import without_memory
from tritondt.found_plan.style_choice import WHOLE
from tritondt.planning.cost import CostTable
from tritondt.redistribution.refusals import refuse_on


def priced(random: Random) -> list[Priced]:
    """Candidates on a chain of layers, of which each takes one or two neighbours."""
    found = []
    for number in range(9):
        first = random.randrange(5)
        names = tuple(f"layer {first + more}" for more in range(random.choice((1, 2))))
        cost = Cost(random.randrange(-9, 9), random.randrange(9), random.randrange(-9, 1), random.randrange(-9, 1))
        found.append(Priced(Candidate(f"candidate {number}", tuple((name, WHOLE) for name in names)), cost))
    return found


def sums_of_all(listed: list[Priced]) -> list[Cost]:
    """Sums of the costs of all choices, one by one."""
    found = []
    for number in range(len(listed) + 1):
        for chosen in combinations(listed, number):
            names = [name for each in chosen for name in each.candidate.names]
            if len(names) == len(set(names)):
                total = Cost()
                for each in chosen:
                    total = total.plus(each.cost)
                found.append(total)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_the_search_keeps_exactly_the_choices_that_none_betters(seed):
    listed = priced(Random(seed))
    found, is_exact = frontier(listed)
    everything = sums_of_all(listed)
    best = {cost for cost in everything if not any(cost != other and cost.is_worse(other) for other in everything)}
    assert is_exact
    assert {chosen.cost for chosen in found} == best
    assert all(isinstance(chosen, Chosen) for chosen in found)


class AsksForValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"gate": Branches()})

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.inner["gate"](x))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        return x if x.sum() > 0 else -x


def test_a_branch_on_values_is_refused_by_operator_and_module():
    with pytest.raises(ParallelizeError, match=r"_local_scalar_dense\S* in inner\.gate \(Branches\) failed there"):
        find_plan(AsksForValues(), {"tp": 2}, torch.ones(3, 4))


def test_inputs_that_do_not_fit_are_refused_by_the_module_that_they_do_not_fit():
    with pytest.raises(ParallelizeError, match="find_plan runs Llama on tensors without values"):
        find_plan(Llama(), {"tp": 2}, torch.ones(2, 3))


@pytest.mark.parametrize(
    ("mesh", "axes", "sentence"),
    [
        ({"dp": 2, "pp": 3}, None, r"nothing can use the axis 'pp' of 3 ranks"),
        ({"dp": 2, "fsdp": 2}, None, r"the axes \['dp', 'fsdp'\] would both have the role 'data'"),
        ({"tp": 0}, None, r"find_plan got the mesh \{'tp': 0\}; allowed are sizes of at least 1 by name"),
        ({"dp": 2, "replicate": 2}, None, r"'replicate' replicates what an axis after it shards, and the mesh is"),
        ({"replicate": 2, "tp": 2}, None, r"with one rank on dp where parameters are not sharded"),
        ({"x": 2}, {"tensor": "x", "data": "x"}, r"two roles for one axis; allowed is an axis for each role"),
        (
            {"tp": 2},
            {"expert": "tp"},
            r"allowed are the roles \('tensor', 'data', 'replicate'\) with names of the mesh, \('tp',\)",
        ),
    ],
)
def test_meshes_whose_axes_have_no_use(mesh, axes, sentence):
    with pytest.raises(MeshError, match=sentence):
        find_plan(nn.Linear(4, 4), mesh, torch.ones(3, 4), axes=axes)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"objective": "speed"}, "objective got 'speed'; allowed are 'step time', 'bytes' and 'memory'"),
        ({"optimizer": "lion"}, "optimizer got 'lion'; allowed are adamw, adam, sgd, sgd with momentum"),
        ({"memory_bytes": 0}, "memory_bytes got 0; allowed is a number of bytes of at least 1"),
        ({"ranks_per_host": 0}, "ranks_per_host got 0; allowed is a number of ranks of at least 1"),
        ({"device_type": "tpu"}, "device_type got 'tpu'; allowed are cpu, cuda"),
    ],
)
def test_values_that_are_not_known(options, sentence):
    with pytest.raises(ArgumentError, match=sentence):
        find_plan(nn.Linear(4, 4), {"tp": 2}, torch.ones(3, 4), **options)


def test_memory_that_no_plan_keeps_within_names_the_nearest_and_what_it_lacks():
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    free = find_plan(model, {"tp": 2}, torch.ones(4, 8), objective="memory")
    assert find_plan(model, {"tp": 2}, torch.ones(4, 8), memory_bytes=free.step.memory.most).step == free.step
    with pytest.raises(ParallelizeError, match=rf"the nearest needs {free.step.memory.most:,}, 1 more: parameters "):
        find_plan(model, {"tp": 2}, torch.ones(4, 8), memory_bytes=free.step.memory.most - 1)


class Normalized(nn.Module):
    """A block that counts the steps in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.up(self.norm(x)))


def test_blocks_that_write_to_buffers_run_once():
    sentence = r"with 0 blocks recomputed, gathered \d+; \* is not recomputed: its forward writes to its buffer norm\."
    with pytest.raises(ParallelizeError, match=sentence):
        find_plan(nn.Sequential(Normalized(), Normalized()), {"tp": 2}, torch.ones(4, 8), memory_bytes=100)


class StopsEarly(nn.Module):
    """A layer in a checkpoint whose recomputation ends before its forward does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.heard = nn.Linear(4, 4), list[bool]()
        self.register_forward_hook(self.after, always_call=True)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        error = sys.exc_info()[1] if output is None else None
        if error is not None:
            self.heard.append(was_told(error))

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.inner(x)).sin() + 1


def test_the_early_end_of_a_recomputation_is_no_error_to_tell_others():
    layer = StopsEarly()
    checkpoint(layer, torch.ones(2, 4), use_reentrant=False).sum().backward()
    assert layer.heard == [True]


def test_a_plan_is_applied_to_the_mesh_that_it_was_found_for():
    plan = find_plan(nn.Linear(4, 4), {"dp": 2}, torch.ones(3, 4))
    with pytest.raises(MeshError, match=r"found for a mesh of dp=2, and apply got dp=3; find one for that"):
        run_ranks(3, lambda rank: plan.apply(nn.Linear(4, 4), T.Mesh((3,), ("dp",))))


def test_an_axis_that_no_layer_can_use_and_one_that_none_is_worth():
    pictures = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    with pytest.raises(ParallelizeError, match=r"nothing can use the axis 'tp' of 2 ranks: Sequential has no linear"):
        find_plan(pictures, {"dp": 2, "tp": 2}, torch.ones(1, 3, 9, 9))
    with pytest.raises(ParallelizeError, match=r"ends at down is not cut: its layers have fewer heads or features"):
        find_plan(Dropping(), {"tp": 64}, torch.ones(4, 8))
    plan = find_plan(Dropping(), {"tp": 2}, torch.ones(4, 8))
    assert plan.code == "# the model stays as it is"
    assert "nothing is cut over tp, whose ranks all compute the same: each of the 5 cuts that run would" in str(plan)


class Summing(NormLast):
    """A block whose norm reads the positions before."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Running()


class WithScale(NormLast):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


@pytest.mark.parametrize(
    ("kinds", "sentence"),
    [
        ((Summing, Summing), r"parts of \* sequences stay whole: 0\.norm is no layer that treats every position by"),
        ((WithScale, WithScale), "stay whole: it has parameters of its own beside those of its layers"),
        ((NormLast, WithScale, NormLast, WithScale), "stay whole: its list has blocks of several kinds"),
    ],
)
def test_blocks_whose_sequences_stay_whole_say_why(kinds, sentence):
    model = nn.Sequential(*(kind() for kind in kinds))
    plan = find_plan(model, {"tp": 2}, torch.ones(2, 6, 24), objective="memory")
    assert not any("sequence" in part.layout for part in plan.parts)
    assert any(re.search(sentence, note) for note in plan.notes), plan.notes


@pytest.mark.parametrize("text", ["{}", "[]", '{"format": 2}', "no JSON"])
def test_text_that_is_no_plan(text):
    with pytest.raises(ArgumentError, match=r"FoundPlan.from_json was given no plan of format 1"):
        FoundPlan.from_json(text)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down(F.dropout(F.relu(self.up(x)), 0.5)))


def test_random_numbers_are_drawn_by_place_where_features_are_cut():
    plan = find_plan(Dropping(), {"tp": 2}, torch.ones(4, 8), costs=CostTable(flop_rate=1e3))
    assert dict(plan.laid_out.styles)["up"].code() == "ColwiseParallel(balanced=True, use_local_output=False)"
    assert plan.laid_out.replicates_plain


def test_the_model_is_left_as_it_is_and_may_be_on_meta():
    model = Dropping()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = find_plan(model, {"tp": 2}, torch.ones(4, 8))
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert find_plan(Dropping().to("meta"), {"tp": 2}, torch.ones(4, 8, device="meta")) == found


class Rows(nn.Module):
    """A layer that runs on those rows alone that a test of their values chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x).index_add(0, torch.where(x[:, 0] > 0)[0], cast(Tensor, self.up(x[x[:, 0] > 0])))


def test_rows_that_values_choose_are_refused_by_operator_and_module():
    with pytest.raises(ParallelizeError, match=r"aten\.nonzero\.default in rows \(Rows\) failed there: Dynamic"):
        find_plan(nn.Sequential(OrderedDict(rows=Rows())), {"tp": 2}, torch.ones(3, 8))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"row": torch.ones(3, 8)}, r"names 'row', and Sequential has no such module inside; allowed are names of its"),
        ({"rows": "(3, 8)"}, r"has '\(3, 8\)' for 'rows'; allowed are a tensor, whose values do not count, or a tuple"),
        ({"rows": ()}, r"has \(\) for 'rows'; allowed are a tensor"),
    ],
)
def test_results_by_hand_are_tensors_of_modules(given, sentence):
    with pytest.raises(ArgumentError, match=sentence):
        find_plan(nn.Sequential(OrderedDict(rows=Rows())), {"tp": 2}, torch.ones(3, 8), module_results=given)


def test_a_refusal_says_how_results_are_given_by_hand_and_a_mesh_cuts_them_with_the_inputs():
    model = nn.Sequential(OrderedDict(rows=Rows(), up=nn.Linear(8, 9)))
    with pytest.raises(ParallelizeError, match=r"or module_results=\{name: a tensor\} with the results of a module"):
        find_plan(model, {"tp": 2}, torch.ones(4, 8))
    found = find_mesh(model, 2, torch.ones(4, 8), module_results={"rows": torch.ones(4, 8)})
    assert {str(plan.mesh): plan.laid_out.given[0].tensors for plan in found.plans} == {
        "dp=1,tp=2": (((4, 8), "float32"),),
        "dp=2,tp=1": (((2, 8), "float32"),),
    }


class Turning(nn.Module):
    """Tables of positions as plain attributes, one of them in a list, as code of Llama keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.turns, self.more = torch.polar(torch.ones(4), torch.arange(4.0)), [torch.arange(8.0)]

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:-1], 4, 2)) * self.turns).flatten(-2)
        return cast(Tensor, self.down(F.relu(self.up(turned + self.more[0]))))


def test_tensors_that_are_plain_attributes_stay_with_values_and_on_meta():
    found = find_plan(Turning(), {"tp": 2}, torch.ones(4, 8), objective="memory")
    assert "up" in dict(found.laid_out.styles)
    with torch.device("meta"):
        assert find_plan(Turning(), {"tp": 2}, torch.ones(4, 8), objective="memory") == found


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 8, 8, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.tensor([2, 4])
        return torch._grouped_mm(x, self.weight, offs=ends)


def test_a_refusal_is_one_sentence_and_torch_prints_no_traceback_beside_it():
    heard = StringIO()
    listener = logging.StreamHandler(heard)
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addHandler(listener)
    filters = list(log.filters)
    try:
        with pytest.raises(ParallelizeError, match=r"_grouped_mm\S* in the model itself \(Grouped\) failed"):
            find_plan(Grouped(), {"tp": 2}, torch.ones(4, 8, dtype=torch.bfloat16))
    finally:
        log.removeHandler(listener)
    assert heard.getvalue() == ""
    assert log.filters == filters


def test_errors_of_a_trial_are_told_to_no_rank_of_a_world():
    def body(rank: int) -> bool:
        error = ValueError("a trial that fails")
        with without_memory(rank, 2):
            refuse_on(T.Mesh((2,)), error)
        return was_told(error)

    assert run_ranks(2, body) == [False, False]


def test_parallel_has_it():
    package: Any = T.parallel
    assert package.find_plan is find_plan
    with pytest.raises(AttributeError, match=r"module 'tritondt\.parallel' has no attribute 'find_plans'"):
        _ = package.find_plans
