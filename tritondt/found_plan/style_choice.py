"""Styles of parallelize_module as values: made, printed as code, and read back from JSON."""

from typing import Any, NamedTuple

from tritondt import parallel
from tritondt.interop import transformers
from tritondt.parallel import ParallelStyle
from tritondt.sharding.placement import parse_placements


class StyleChoice(NamedTuple):
    """A style by the name of its class and its arguments; layouts are text, as "R" and "S1", None, or tuples of these.

    >>> StyleChoice("RowwiseParallel", (("unit", 4), ("output_layouts", "S1"))).code()
    'RowwiseParallel(unit=4, output_layouts=Shard(1))'
    """

    kind: str
    options: tuple[tuple[str, Any], ...] = ()

    def make(self) -> ParallelStyle:
        """The style itself, a new one for each module."""
        package = parallel if self.package == "tritondt.parallel" else transformers
        made: ParallelStyle = getattr(package, self.kind)(**{name: _value(name, it) for name, it in self.options})
        return made

    @property
    def package(self) -> str:
        """The package that has the class."""
        return "tritondt.interop.transformers" if self.kind == "ShardedExperts" else "tritondt.parallel"

    def code(self) -> str:
        """The expression that makes the style."""
        return f"{self.kind}({', '.join(f'{name}={_code(name, value)}' for name, value in self.options)})"

    def to_json(self) -> list[Any]:
        """The class's name and the arguments, as JSON has them."""
        return [self.kind, dict(self.options)]

    @classmethod
    def from_json(cls, found: list[Any]) -> "StyleChoice":
        """The choice that `to_json` wrote.

        >>> choice = StyleChoice("ColwiseParallel", (("balanced", True),))
        >>> StyleChoice.from_json(choice.to_json()) == choice
        True
        """
        kind, options = found
        return cls(kind, tuple((name, tuple(it) if isinstance(it, list) else it) for name, it in options.items()))

    def with_options(self, **options: Any) -> "StyleChoice":
        """The choice with other options in place of its own, or beside them.

        >>> StyleChoice("RowwiseParallel", (("unit", 4),)).with_options(output_layouts="S1").code()
        'RowwiseParallel(unit=4, output_layouts=Shard(1))'
        """
        return StyleChoice(self.kind, tuple({**dict(self.options), **options}.items()))


def style(kind: str, **options: Any) -> StyleChoice:
    """The choice of a class and arguments; those that are None or the class's own default 1 or False are left out."""
    return StyleChoice(kind, tuple((name, it) for name, it in options.items() if it not in (None, 1) or it is True))


WHOLE = style("ReplicateParallel")


def _value(name: str, value: Any) -> Any:
    if not name.endswith("_layouts") or value is None:
        return value
    if isinstance(value, tuple):
        return tuple(_value(name, each) for each in value)
    return parse_placements(value)[0]


def _code(name: str, value: Any) -> str:
    if not name.endswith("_layouts") or value is None:
        return repr(value)
    if isinstance(value, tuple):
        return f"({', '.join(_code(name, each) for each in value)})"
    (placement,) = parse_placements(value)
    return "Replicate()" if placement.is_replicate() else f"Shard({value[1:]})"
