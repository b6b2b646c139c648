"""Models laid out by a found plan, on rank threads: the losses of one process, and exactly the predicted bytes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tritondt as T
from tests.found_plan.models import (
    BlocksInTuples,
    Llama,
    NormsLast,
    Pictures,
    Scaled,
    WrittenOut,
    features_of,
    pictures_of,
    seeded,
    tokens_of,
)
from tritondt.cli.demo.model import GPT, Model
from tritondt.comm import world
from tritondt.comm.transports.threads import run_ranks
from tritondt.debug import CommDebugMode
from tritondt.found_plan import FoundPlan, find_plan
from tritondt.found_plan.mesh_axes import mesh_axes
from tritondt.found_plan.predict import predicted_step
from tritondt.found_plan.prices import Prices
from tritondt.planning.cost import CostTable

# Computing is so dear that cuts of small models are worth their messages, and each message still counts.
DEAR = {"flop_rate": 1e8}
Inputs = Callable[[int], dict[str, Any]]


def gpt(layers: int = 2) -> nn.Module:
    return GPT(Model(heads=6, layers=layers, width=24, sequence=16))


def gpt_inputs(part: int) -> dict[str, Any]:
    return {"tokens": tokens_of(part, 16), "positions": torch.arange(16)}


def by_tokens(part: int) -> dict[str, Any]:
    return {"tokens": tokens_of(part)}


def by_features(part: int) -> dict[str, Any]:
    return {"x": features_of(part)}


def by_pictures(part: int) -> dict[str, Any]:
    return {"x": pictures_of(part)}


def loss_of(model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    output: Any = model(**inputs)
    scores: torch.Tensor = getattr(output, "logits", output)
    if not scores.ndim:
        return scores
    scores = scores.flatten(0, -2)
    return F.cross_entropy(scores, torch.arange(scores.shape[0]) % scores.shape[1])


def train(model: nn.Module, batches: list[dict[str, Any]]) -> list[float]:
    """Losses of three steps on the mean over some batches."""
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = sum((loss_of(model, batch) for batch in batches), torch.zeros(())) / len(batches)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def check(
    make: Callable[[], nn.Module], inputs: Inputs, sizes: dict[str, int], *, every: bool = False, **options: Any
) -> FoundPlan:
    """The plan found for a model, trained by its code on rank threads, first and last of which are predicted."""
    axes = mesh_axes(sizes)
    num_parts = axes.num_parts
    predicted = range(axes.num_ranks) if every else (0, axes.num_ranks - 1)
    costs: CostTable = run_ranks(axes.num_ranks, lambda rank: world.current().costs_for("cpu"))[0]
    expected = train(seeded(make), [inputs(part) for part in range(num_parts)])
    costs = costs.with_prices(DEAR)
    plan = find_plan(seeded(make), sizes, inputs(0), costs=costs, **options)
    assert FoundPlan.from_json(plan.to_json()) == plan

    def laid_out(mesh: T.Mesh, *, by_code: bool = False) -> nn.Module:
        model: nn.Module = seeded(make)
        if not by_code:
            return plan.apply(model, mesh)
        exec(plan.code, {"model": model, "mesh": dict.fromkeys((*axes.names, axes.data_axes), mesh)})
        return model

    def body(rank: int) -> Any:
        own = inputs(axes.part_of(rank))
        mesh = T.Mesh(axes.sizes, axes.names)
        model = laid_out(mesh)
        with CommDebugMode() as comm:
            loss_of(model, own).backward()
        messages = sum(count.num_sent for count in comm.by_kind().values())
        counted = comm.get_sent_bytes(), comm.get_received_bytes(), messages
        if rank not in predicted:
            return train(laid_out(mesh, by_code=axes.data_axes in ((), axes.names) or mesh.ndim == 1), [own])
        prices = Prices("cpu", costs, world.current().hosts(range(axes.num_ranks)))
        step = predicted_step(
            seeded(make), ((), own), axes, plan.laid_out, prices, rank, train=True, optimizer_tensors=2
        )
        found = step.traffic
        assert counted == (found.sent_bytes, found.received_bytes, found.messages), str(comm)
        held = sum(
            T.DTensor.to_local(it).nbytes if isinstance(it, T.DTensor) else it.nbytes for it in model.parameters()
        )
        assert held == step.memory.parameters
        assert rank or step == plan.step
        return train(laid_out(mesh, by_code=axes.data_axes in ((), axes.names) or mesh.ndim == 1), [own])

    found = run_ranks(axes.num_ranks, body)
    means = [sum(losses) / axes.num_ranks for losses in zip(*found, strict=True)]
    torch.testing.assert_close(means, expected, rtol=0, atol=1e-5)
    return plan


def styles(plan: FoundPlan) -> dict[str, str]:
    return {pattern: choice.code() for pattern, choice in plan.laid_out.styles}


def test_six_heads_and_uneven_features_over_four_ranks():
    plan = check(gpt, gpt_inputs, {"tp": 4}, objective="memory")
    found = styles(plan)
    assert found["blocks.*.attention.qkv"] == "ColwiseParallel(unit=4, repeats=3, balanced=True)"
    scattered = "output_layouts=Shard(1), use_local_output=False"
    assert found["blocks.*.attention.wo"] == f"RowwiseParallel(unit=4, balanced=True, {scattered})"
    assert found["blocks.*.mlp.up"] == "ColwiseParallel(balanced=True)"
    assert not plan.laid_out.replicates_plain


def test_fewer_key_heads_than_ranks_a_norm_of_heads_and_a_shared_table_over_two_axes():
    plan = check(partial(Llama, tied=True), by_tokens, {"dp": 2, "tp": 3})
    found = styles(plan)
    assert found["blocks.*.attention.wq"] == "ColwiseParallel(unit=4, groups=2)"
    assert found["blocks.*.attention.wk"] == "KeyValueParallel(unit=4)"
    assert found["blocks.*.attention.query_norm"] == "ReplicateParallel(input_layouts=Shard(0))"
    # Whose output three projections share, so that their gradients are summed over the ranks at once.
    assert found["blocks.*.attention_norm"] == "ReplicateParallel(use_local_output=False)"
    # Of two blocks, each by itself would be gathered twice in a step.
    assert plan.laid_out.sharded == ()


def test_sequences_are_cut_between_the_parts_of_blocks_unevenly_too():
    make, sizes = partial(Llama, 6, 2, length=3, tied=True), {"tp": 4}
    plan = check(make, by_tokens, sizes, objective="memory")
    found = styles(plan)
    scattered = "output_layouts=Shard(1), use_local_output=False"
    assert found["blocks.0"] == (
        "PrepareModuleInput(input_layouts=(Replicate(), None), desired_input_layouts=(Shard(1), None))"
    )
    assert found["blocks.2"] == "PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())"
    assert found["blocks.*.norm"] == "SequenceParallel(output_layouts=Replicate())"
    assert found["blocks.*.mlp.down"] == f"RowwiseParallel(balanced=True, {scattered})"
    assert found["embed"] == "RowwiseParallel(balanced=True)"
    assert found["head"] == "ColwiseParallel(balanced=True, output_layouts=Replicate())"
    whole = find_plan(seeded(make), sizes, by_tokens(0), costs=CostTable(flop_rate=1e8))
    assert "blocks.0" not in styles(whole)
    assert plan.step.memory.activations < 0.8 * whole.step.memory.activations


@pytest.mark.parametrize("kind", [BlocksInTuples, NormsLast], ids=lambda kind: kind.__name__)
def test_sequences_of_blocks_that(kind):
    plan = check(kind, by_features, {"dp": 2, "tp": 2}, objective="memory")
    assert plan.laid_out.sharded == ("*" if kind is NormsLast else "blocks.*",)
    assert any("cut the sequence, dim 1" in part.layout for part in plan.parts), plan


OBJECTIVES = ("step time", "bytes", "memory")
# Every objective on one mesh, and one on each of the others; the rest is soak.
FIRST = {("dp", "tp"): OBJECTIVES, ("tp", "dp"): ("step time",), ("dp",): ("bytes",), ("tp",): ("memory",)}


@pytest.mark.extended
@pytest.mark.parametrize(
    ("make", "inputs"),
    [(gpt, gpt_inputs), (Llama, by_tokens), (partial(Llama, tied=True), by_tokens), (Pictures, by_pictures)],
    ids=["gpt", "llama", "tied", "pictures"],
)
@pytest.mark.parametrize(
    ("sizes", "objective"),
    [
        pytest.param(
            sizes,
            objective,
            marks=[] if objective in FIRST[tuple(sizes)] and sizes != {"tp": 2} else pytest.mark.soak,
            id=f"{sizes}-{objective}",
        )
        for sizes in ({"tp": 2}, {"tp": 3}, {"dp": 2, "tp": 2}, {"tp": 2, "dp": 2}, {"dp": 4})
        for objective in OBJECTIVES
    ],
)
def test_every_objective_on_every_mesh(make, inputs, sizes, objective):
    check(make, inputs, sizes, every=True, objective=objective)


def rows_of(part: int) -> dict[str, Any]:
    return {"input": torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(part))}


def blocks_alone() -> nn.Sequential:
    """A model that is itself the list of its blocks."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 6)) for _ in range(4)))


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_a_model_that_is_a_list_of_blocks(sizes):
    plan = check(blocks_alone, rows_of, sizes, objective="memory")
    assert plan.laid_out.sharded == ("*",)
    assert 'for block in model:\n    fully_shard(block, mesh=mesh["dp"])' in plan.code


def bounded(
    make: Callable[[], nn.Module], inputs: Inputs, sizes: dict[str, int], share: float, **options: Any
) -> FoundPlan:
    """The plan within a share of the memory that a step takes whose blocks keep all activations, trained."""
    given = sizes, inputs(0)
    free = find_plan(seeded(make), *given, objective="memory", costs=CostTable(flop_rate=1e8))
    return check(make, inputs, sizes, memory_bytes=int(free.step.memory.most * share), **options)


@pytest.mark.parametrize(
    ("sizes", "objective"),
    [
        ({"replicate": 2, "dp": 2}, "memory"),
        pytest.param({"replicate": 2, "dp": 2, "tp": 2}, "step time", marks=pytest.mark.extended),
        pytest.param({"replicate": 3, "dp": 1}, "bytes", marks=pytest.mark.extended),
    ],
    ids=str,
)
def test_parameters_are_sharded_inside_of_replicas(sizes, objective):
    plan = check(blocks_alone, rows_of, sizes, every=True, objective=objective)
    assert 'fully_shard(model, mesh=mesh["replicate", "dp"])' in plan.code
    memory, alone = plan.step.memory, find_plan(blocks_alone(), {"dp": sizes["dp"]}, rows_of(0))
    if "tp" not in sizes and sizes["dp"] > 1:
        assert memory.parameters == alone.step.memory.parameters


def many_rows(part: int) -> dict[str, Any]:
    return {"input": rows_of(part)["input"].repeat(1, 90, 1)}


def longer(inputs: Inputs, part: int) -> dict[str, Any]:
    return {name: value.repeat_interleave(4, 1) for name, value in inputs(part).items()}


def test_blocks_compute_activations_again_to_keep_within_memory():
    plan = bounded(blocks_alone, many_rows, {"tp": 2}, 0.95)
    (found,) = plan.recomputed
    assert plan.laid_out.recomputed == tuple(map(str, range(found.number)))
    assert (found.name, found.total) == ("*", 4)
    assert found.flops > 0
    assert "recomputed  blocks  each: FLOPs  bytes in" in plan.explain()
    assert 'for name in [f"{index}" for index in range(0, ' in plan.code


@pytest.mark.extended
@pytest.mark.parametrize(
    ("make", "inputs", "sizes", "share"),
    [
        (partial(Llama, length=3), partial(longer, by_tokens), {"dp": 2, "tp": 2}, 0.9),
        (partial(gpt, 3), gpt_inputs, {"tp": 2}, 0.985),
        (partial(gpt, 3), gpt_inputs, {"dp": 2}, 0.9),
        pytest.param(partial(Llama, length=3), partial(longer, by_tokens), {"tp": 2}, 0.9, marks=pytest.mark.soak),
    ],
    ids=["llama, dp and tp", "gpt, tp", "gpt, dp", "llama, tp"],
)
def test_blocks_compute_activations_again_on_every_mesh(make, inputs, sizes, share):
    plan = bounded(make, inputs, sizes, share, every=True)
    assert plan.recomputed, plan


class Often(nn.Module):
    """Blocks of which one runs twice under two names, and lists of which each block runs twice, and not at all."""

    def __init__(self) -> None:
        super().__init__()
        first, second, *_ = blocks_alone()
        self.listed = nn.ModuleList([first, second, first])
        self.twice, self.never, self.once = (nn.ModuleList(blocks_alone()) for _ in range(3))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        for block in (*self.listed, *self.twice, *self.twice, *self.once):
            input = input + block(input)
        return input


def test_blocks_that_do_not_run_just_once_stay_in_the_group_of_the_model():
    plan = check(Often, rows_of, {"dp": 2}, objective="memory")
    assert plan.laid_out.sharded == ("listed.1", "once.*")


def test_code_that_has_the_number_of_heads_written_out_runs_on_distributed_tensors():
    plan = check(WrittenOut, by_tokens, {"tp": 3})
    assert plan.laid_out.replicates_plain
    assert "use_local_output=False" in styles(plan)["qkv"]


def test_parameters_that_code_reads_between_layers_are_not_cut_through():
    plan = check(Scaled, by_tokens, {"tp": 2})
    assert "down" not in {part.name for part in plan.parts if part.layout.endswith("features")}
    assert styles(plan)["twice"].endswith("output_layouts=Replicate())")


@pytest.mark.extended
def test_linear_layers_in_a_row_are_paired_once_each():
    plan = check(Pictures, by_pictures, {"tp": 2}, objective="memory")
    found = styles(plan)
    assert found["first"] == found["norm"] == "ReplicateParallel()"
    assert {name for name in found if name.startswith("rest.")} == {"rest.0", "rest.2", "rest.4"}


def _transformers(kind: str, config: str, **sizes: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        transformers = pytest.importorskip("transformers")
        found: nn.Module = getattr(transformers, kind)(getattr(transformers, config)(**sizes))
        return found

    return make


_SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "intermediate_size": 18, "vocab_size": 21}
_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 4}
_MIXTURE = {**_SIZES, **_HEADS, "intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_GPT2 = {"n_embd": 24, "n_layer": 2, "n_head": 6, "vocab_size": 21, "n_positions": 8}


@pytest.mark.extended
@pytest.mark.parametrize("sizes", [{"tp": 4}, {"dp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize(
    "make",
    [
        _transformers("LlamaForCausalLM", "LlamaConfig", **_SIZES, **_HEADS),
        _transformers("Qwen3ForCausalLM", "Qwen3Config", **_SIZES, **_HEADS),
        _transformers("GPT2LMHeadModel", "GPT2Config", **_GPT2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
        _transformers("BertForMaskedLM", "BertConfig", **_SIZES, num_attention_heads=6, **_NO_DROPOUT),
    ],
    ids=["llama", "qwen3", "gpt2", "bert"],
)
def test_models_of_transformers(make, sizes):
    options = {} if "Bert" in make.__closure__[2].cell_contents else {"use_cache": False}
    plan = check(make, lambda part: {"input_ids": tokens_of(part), **options}, sizes, every=True)
    assert any("heads" in part.layout for part in plan.parts), plan


@pytest.mark.extended
@pytest.mark.parametrize("sizes", [{"dp": 2, "tp": 2}, pytest.param({"tp": 4}, marks=pytest.mark.soak)], ids=str)
def test_experts_of_transformers_are_cut_by_features(sizes):
    make = _transformers("MixtralForCausalLM", "MixtralConfig", **_MIXTURE | {"num_local_experts": 3})
    plan = check(make, lambda part: {"input_ids": tokens_of(part), "use_cache": False}, sizes, every=True)
    assert styles(plan)["model.layers.*.mlp.experts"].startswith("ShardedExperts(features={'gate_up_proj': 'packed_")


class Chosen(nn.Module):
    """A layer that runs on those rows alone that a test of their values chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.where(x[..., 0] > 0)
        return torch.zeros_like(x).index_put(rows, self.inner(x[rows]))


class ChoosingBlock(nn.Module):
    """A layer beside one whose shapes follow from values."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen, self.mlp = Chosen(), nn.Sequential(nn.Linear(6, 15), nn.ReLU(), nn.Linear(15, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.chosen(x)
        found: torch.Tensor = x + self.mlp(x)
        return found


@pytest.mark.parametrize("sizes", [{"dp": 2, "tp": 2}, pytest.param({"tp": 3}, marks=pytest.mark.extended)], ids=str)
def test_modules_that_need_values_have_results_by_hand(sizes):
    given = {"*.chosen": torch.empty(2, 3, 6, device="meta")}
    plan = check(
        lambda: nn.Sequential(*(ChoosingBlock() for _ in range(3))),
        rows_of,
        sizes,
        objective="memory",
        module_results=given,
    )
    assert "*.mlp.2" in styles(plan)
    assert not any("chosen" in name for name in styles(plan)), plan
    assert "*.chosen was not run: its results are given, its FLOPs do not count" in plan.notes


class WithLoss(nn.Module):
    """A model of many classes that gives its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(21, 24), nn.Linear(24, 301)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        scores = self.head(self.embed(tokens))
        return F.cross_entropy(scores.flatten(0, -2), tokens.roll(-1, 1).flatten())


@pytest.mark.parametrize("sizes", [{"tp": 3}, pytest.param({"dp": 2, "tp": 2}, marks=pytest.mark.extended)], ids=str)
def test_a_model_that_gives_its_loss_takes_it_of_scores_in_parts(sizes):
    plan = check(WithLoss, by_tokens, sizes, objective="memory")
    assert styles(plan)["head"] == "ColwiseParallel(balanced=True, use_local_output=False)"
    assert styles(plan)[""] == "PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Replicate())"
    assert any(part.layout == "cut columns, and the loss" for part in plan.parts)


@pytest.mark.extended
@pytest.mark.parametrize("sizes", [{"tp": 3}, {"dp": 2, "tp": 2}], ids=str)
def test_ranks_have_whole_experts_where_features_cannot_be_cut(sizes):
    sizes_of_it = {**_MIXTURE, "num_local_experts": 5, "intermediate_size": 4}
    make = _transformers("MixtralForCausalLM", "MixtralConfig", **sizes_of_it)
    plan = check(make, lambda part: {"input_ids": tokens_of(part), "use_cache": False}, sizes, every=True)
    assert styles(plan)["model.layers.*.mlp.experts"] == "ShardedExperts()"
