"""The cost table that a rank brings to its world."""

from tritondt import environment
from tritondt.errors import WorldError
from tritondt.planning.cost import CostTable


def default_costs(world_size: int) -> CostTable:
    """The built-in prices, and those of the environment in place of them; WorldError where those are none."""
    per_host, given = environment.ranks_per_host(), environment.costs()
    table = CostTable(ranks_per_host=world_size if per_host is None else per_host)
    if given is None:
        return table
    try:
        return table.with_json(given)
    except ValueError as error:
        raise WorldError(
            f"TRITONDT_COSTS={given!r} is set, but {error}; allowed are fields of tritondt.planning.cost.CostTable as "
            'a JSON object, such as {"network": {"bandwidth": 1e8}}'
        ) from error
