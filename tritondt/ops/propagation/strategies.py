"""Ways to shard an operator over all axes of a mesh at once, as strategy functions offer them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tritondt.errors import PropagationError
from tritondt.sharding.mesh import Mesh
from tritondt.sharding.spec import DTensorSpec, TensorMeta

# The spec of every output in the operator's order, None where it is no tensor; a lone output stands by itself.
OutputSpecs: TypeAlias = "DTensorSpec | Sequence[DTensorSpec | None] | None"


def specs_in(arguments: Sequence[Any]) -> Iterator[DTensorSpec]:
    """The specs among arguments and in lists of them; of an argument given as a strategy, the spec that it has."""
    for argument in arguments:
        if isinstance(argument, DTensorSpec):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from specs_in(argument)
        elif isinstance(argument, OpStrategy):
            yield argument.strategies[0].output_spec
        elif isinstance(argument, TupleStrategy):
            yield from specs_in(argument.childs)


@dataclass(frozen=True, slots=True)
class PlacementStrategy:
    """One way to shard an operator over all axes; `redistribute_cost` has bytes per input, or a list of one number.

    Without `input_specs` every tensor argument must have the placements of the lone output. Without `redistribute_cost`
    the bytes that the arguments would move are computed. Specs need no `tensor_meta`: shapes, strides and dtypes are
    those of the arguments and of the operator's results.
    """

    output_specs: OutputSpecs
    input_specs: Sequence[DTensorSpec] | None = None
    redistribute_cost: Sequence[float | Sequence[float]] | None = None

    @property
    def output_spec(self) -> DTensorSpec:
        """The spec of the lone output; PropagationError where there are several, or none."""
        if isinstance(self.output_specs, DTensorSpec):
            return self.output_specs
        raise PropagationError(f"output_spec was asked for of {self}; allowed is an operator of one tensor")

    @property
    def mesh(self) -> Mesh:
        """The mesh of the first tensor among outputs, then inputs; PropagationError where there is none."""
        first = next(specs_in((self.output_specs, self.input_specs)), None)
        if first is None:
            raise PropagationError(f"the mesh was asked for of {self}, which has no tensor")
        return first.mesh

    @property
    def total_cost(self) -> float:
        """Bytes of all inputs together."""
        return sum(cost if isinstance(cost, int | float) else min(cost) for cost in self.redistribute_cost or ())

    def input_spec(self, index: int = 0) -> DTensorSpec:
        """The spec of a tensor argument; PropagationError where there is none at that index."""
        if self.input_specs is None or not 0 <= index < len(self.input_specs):
            raise PropagationError(
                f"input {index} was asked for of {self}; it has {len(self.input_specs or ())} inputs"
            )
        return self.input_specs[index]


# The name in torch 2.13; PlacementStrategy is the former one, which code for older versions uses.
OpSpec = PlacementStrategy


@dataclass(frozen=True, slots=True)
class OpStrategy:
    """The choices of a strategy function, over all axes at once."""

    strategies: Sequence[PlacementStrategy]

    @property
    def mesh(self) -> Mesh:
        """The mesh of all strategies."""
        return self.strategies[0].mesh

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Ranks along each axis of the mesh."""
        return self.mesh.shape

    @property
    def tensor_meta(self) -> TensorMeta:
        """Global shape, stride and dtype of the output."""
        return self.strategies[0].output_spec.tensor_meta

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape of the output."""
        return self.tensor_meta.shape

    @property
    def ndim(self) -> int:
        """Number of the output's dims."""
        return len(self.shape)

    def max_num_shards(self) -> int:
        """Most pieces into which a strategy cuts the output."""
        return max(strategy.output_spec.num_shards for strategy in self.strategies)


@dataclass(frozen=True, slots=True)
class TupleStrategy:
    """Strategies of a list argument or of a list of results, one per element."""

    childs: Sequence[OpStrategy]

    @property
    def children(self) -> Sequence[OpStrategy]:
        """The strategies of the elements: the name in torch 2.13, where `childs` is deprecated."""
        return self.childs

    def child_mesh(self, index: int) -> Mesh:
        """The mesh of an element's strategies."""
        return self.childs[index].mesh
