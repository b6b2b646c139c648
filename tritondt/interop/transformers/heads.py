"""Attention modules of transformers: their heads, the styles that cut them whole, and what a rank has of them."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import nn

from tritondt.errors import ParallelizeError
from tritondt.interop.transformers.entries import Entry, is_transposed
from tritondt.parallel import ColwiseParallel, KeyValueParallel, ParallelStyle, RowwiseParallel
from tritondt.parallel.feature_cut import FeatureCut
from tritondt.parallel.linear import linear_features
from tritondt.sharding.mesh import Mesh

_QUERIES, _KEYS, _VALUES = ("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value")
_KNOWN = ", ".join(name for names in (_QUERIES, _KEYS, _VALUES) for name in names)
# Attributes by which the code of attention knows its number of heads.
HEAD_ATTRIBUTES = frozenset(
    ("num_key_value_groups", "num_key_value_heads", "num_heads", "num_attention_heads", "all_head_size")
)


class Attention(NamedTuple):
    """An attention module whose heads are cut: the projections of the plan by their names in it."""

    name: str
    module: nn.Module
    queries: nn.Linear
    keys: nn.Linear
    values: nn.Linear
    num_heads: int
    num_key_heads: int

    def input_styles(self) -> Iterator[tuple[nn.Linear, ParallelStyle]]:
        """Styles of the projections to heads: no rank has queries of two key heads unless it has all of both."""
        yield self.queries, ColwiseParallel(unit=self.queries.out_features // self.num_heads, groups=self.num_key_heads)
        for projection in (self.keys, self.values):
            unit = projection.out_features // self.num_key_heads
            yield projection, KeyValueParallel(unit=unit)

    def output_style(self, projection: nn.Module) -> RowwiseParallel:
        """Style of the projection of all heads' results."""
        num_features = linear_features(projection)[0]
        unit, left = divmod(num_features, self.num_heads)
        if left:
            raise ParallelizeError(
                f"{self.name} has {self.num_heads} heads, and its output is projected from {num_features} "
                "features; allowed is a number of features that the heads divide"
            )
        return RowwiseParallel(unit=unit, groups=self.num_key_heads)

    def heads_on(self, mesh: Mesh) -> list[int]:
        """Numbers of query heads of the ranks; ParallelizeError where a rank would have none."""
        return _heads_of_ranks(self.name, self.num_heads, self.num_key_heads, mesh)

    def adapt(self, mesh: Mesh) -> None:
        """Sets what the module's code knows of its number of heads to those of this rank."""
        assert mesh.coordinate is not None, "this rank is on the mesh"
        (place,), num_ranks = mesh.coordinate, mesh.shape[0]
        num_heads = self.heads_on(mesh)[place]
        num_key_heads = 1
        if self.num_key_heads >= num_ranks:
            num_key_heads = num_heads * self.num_key_heads // self.num_heads
        local = {
            "num_key_value_groups": num_heads // num_key_heads,
            "num_key_value_heads": num_key_heads,
            "num_heads": num_heads,
            "num_attention_heads": num_heads,
            "all_head_size": num_heads * (self.queries.out_features // self.num_heads),
        }
        for name in HEAD_ATTRIBUTES & vars(self.module).keys():
            setattr(self.module, name, local[name])


class MergedAttention(NamedTuple):
    """An attention module of GPT-2 whose heads are cut: `num_blocks` of queries, keys or values in one projection."""

    name: str
    module: nn.Module
    num_blocks: Mapping[nn.Module, int]
    num_heads: int
    head_dim: int

    def input_styles(self) -> Iterator[tuple[nn.Module, ParallelStyle]]:
        """Styles of the projections to heads, each of whose blocks is cut alike."""
        for projection, repeats in self.num_blocks.items():
            yield projection, ColwiseParallel(unit=self.head_dim, balanced=True, repeats=repeats, transposed=True)

    def output_style(self, projection: nn.Module) -> RowwiseParallel:
        """Style of the projection of all heads' results."""
        return RowwiseParallel(unit=self.head_dim, balanced=True, transposed=is_transposed(projection))

    def heads_on(self, mesh: Mesh) -> list[int]:
        """Numbers of heads of the ranks; ParallelizeError where a rank would have none."""
        return _heads_of_ranks(self.name, self.num_heads, self.num_heads, mesh)

    def adapt(self, mesh: Mesh) -> None:
        """Sets what the module's code knows of its number of heads to those of this rank."""
        assert mesh.coordinate is not None, "this rank is on the mesh"
        num_heads = self.heads_on(mesh)[mesh.coordinate[0]]
        self.module.num_heads = num_heads  # type: ignore[assignment]
        self.module.split_size = num_heads * self.head_dim  # type: ignore[assignment]


AnyAttention = Attention | MergedAttention


def _heads_of_ranks(name: str, num_heads: int, num_key_heads: int, mesh: Mesh) -> list[int]:
    sizes = FeatureCut(groups=num_key_heads).shard(0, num_heads, mesh.shape[0]).sizes
    assert sizes is not None, "groups of heads have sizes"
    if 0 in sizes:
        raise ParallelizeError(
            f"{name} has {num_heads} heads of {num_key_heads} key heads, which over {mesh.shape[0]} ranks are "
            f"{', '.join(map(str, sizes))}; allowed is a mesh on which each rank has a head, for the model's code "
            "reshapes by the number of heads that it finds"
        )
    return list(sizes)


def attention_of(name: str, attentions: Mapping[str, AnyAttention]) -> AnyAttention | None:
    """The attention whose heads' results a module projects: the one around it, or `self` beside `output` around it."""
    parent = name.rpartition(".")[0]
    around, _, key = parent.rpartition(".")
    return attentions.get(parent) or (attentions.get(f"{around}.self") if key == "output" else None)


def attentions_of(model: nn.Module, entries: list[Entry]) -> dict[str, AnyAttention]:
    """Attention modules, by name, of which the plan cuts the projections to heads."""
    cut: dict[str, dict[str, nn.Module]] = {}
    for entry in entries:
        parent, _, key = entry.name.rpartition(".")
        if entry.style == "colwise" and not entry.key:
            cut.setdefault(parent, {})[key] = entry.module
    modules = dict(model.named_modules())
    found = {name: _attention(name, modules[name], projections) for name, projections in cut.items()}
    return {name: attention for name, attention in found.items() if attention is not None}


def _attention(name: str, module: nn.Module, projections: Mapping[str, nn.Module]) -> AnyAttention | None:
    head_dim = getattr(module, "head_dim", getattr(module, "attention_head_size", None))
    if not isinstance(head_dim, int):
        return None
    if "c_attn" in projections and all(map(is_transposed, projections.values())):
        width = head_dim * getattr(module, "num_heads", 1)
        blocks = {projection: linear_features(projection)[1] // width for projection in projections.values()}
        return MergedAttention(name, module, blocks, width // head_dim, head_dim)
    roles = [[value for key, value in projections.items() if key in names] for names in (_QUERIES, _KEYS, _VALUES)]
    found = [value for values in roles for value in values if isinstance(value, nn.Linear)]
    if len(found) != 3 or len(projections) != 3:
        raise ParallelizeError(
            f"{name} has heads of {head_dim} features, and the tp_plan has 'colwise' for {', '.join(projections)}; "
            f"known are nn.Linear to queries, keys and values apart ({_KNOWN}): give a tp_plan with "
            "'colwise_gather_output' for them, and 'rowwise_split_input' for what follows"
        )
    queries, keys, values = found
    num_key_heads, left = divmod(keys.out_features, head_dim)
    # How many queries share a key head says the module; one whose queries have gates beside them has more features.
    per_key_head = getattr(module, "num_key_value_groups", queries.out_features // max(1, keys.out_features))
    num_heads = num_key_heads * per_key_head
    if left or not num_heads or queries.out_features % num_heads or values.out_features % num_key_heads:
        raise ParallelizeError(
            f"{name} has heads of {head_dim} features, and projects to {queries.out_features} of queries, "
            f"{keys.out_features} of keys and {values.out_features} of values; allowed are whole heads"
        )
    return Attention(name, module, queries, keys, values, num_heads, num_key_heads)
