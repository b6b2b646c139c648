"""The cost table of a world: the built-in one, changed by TRITONDT_COSTS."""

import pytest

import tritondt as T
from tests.harness.gloo_ranks import GlooRanks
from tritondt.comm import world
from tritondt.comm.process_world import default_costs
from tritondt.planning import prices
from tritondt.planning.cost import CostTable, Link


def test_the_environment_changes_prices(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    tables = prices.built_in(4)
    assert default_costs(4) == {**tables, "cpu": prices.in_shared_memory(tables["cpu"], 16 << 20)}
    monkeypatch.setenv("TRITONDT_TRANSPORT", "sockets")
    assert default_costs(4) == prices.built_in(4)
    assert default_costs(4)["cpu"] == CostTable(ranks_per_host=4)
    text = '{"network": {"bandwidth": 1e8}, "host": {"busy_share": 0}, "ranks_per_host": 2, "max_peers": 7.0}'
    monkeypatch.setenv("TRITONDT_COSTS", text)
    changed = CostTable(host=Link(30e-6, 2e9), network=Link(60e-6, 1e8), ranks_per_host=2, max_peers=7)
    assert default_costs(4)["cpu"] == changed
    assert CostTable.from_json(changed.to_json()) == changed
    assert isinstance(default_costs(4)["cpu"].max_peers, int)
    assert default_costs(4)["cuda"].network.bandwidth == 1e8
    assert prices.from_json(prices.to_json(default_costs(4))) == default_costs(4)


def test_prices_of_a_type_of_device_change_no_other(monkeypatch):
    monkeypatch.setenv("TRITONDT_TRANSPORT", "sockets")
    monkeypatch.setenv("TRITONDT_COSTS", '{"cuda": {"launch_s": 0, "host": {"bandwidth": 1e11}}, "max_peers": 9}')
    found = default_costs(4)
    assert (found["cuda"].launch_s, found["cuda"].host.bandwidth, found["cuda"].max_peers) == (0.0, 1e11, 9)
    assert found["cpu"] == CostTable(ranks_per_host=4, max_peers=9)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "Expecting property name"),
        ("[1]", r"\[1\] is given for CostTable; allowed is an object of prices by name"),
        ('{"link": 1}', "'link' is no price of CostTable; allowed are device, host, network, copy_bandwidth, "),
        ('{"host": 1}', "1 is given for Link; allowed is an object of prices by name"),
        ('{"host": {"speed": 1}}', "'speed' is no price of Link; allowed are latency_s, bandwidth, busy_share"),
        ('{"host": {"bandwidth": 0}}', "0 is given for 'bandwidth'; allowed is a number above 0"),
        ('{"host": {"busy_share": 1.5}}', "1.5 is given for 'busy_share'; allowed is a number from 0 to 1"),
        ('{"copy_bandwidth": true}', "True is given for 'copy_bandwidth'; allowed is a number above 0"),
        ('{"copy_bandwidth": Infinity}', "inf is given for 'copy_bandwidth'; allowed is a number above 0"),
        ('{"cuda": {"launch_s": -1}}', "-1 is given for 'launch_s'; allowed is a number of 0 or more"),
        ('{"one_shot_bytes": 1.5}', "1.5 is given for 'one_shot_bytes'; allowed is a whole number of 0 or more"),
        ('{"cuda": 3}', "3 is given for CostTable; allowed is an object of prices by name"),
        ('{"max_peers": 1.5}', "1.5 is given for 'max_peers'; allowed is a whole number above 0"),
    ],
)
def test_what_are_no_prices(monkeypatch, text, sentence):
    monkeypatch.setenv("TRITONDT_COSTS", text)
    with pytest.raises(
        T.WorldError, match=r"TRITONDT_COSTS=.* is set, but .*" + sentence + ".*; allowed are fields of"
    ):
        default_costs(4)


def bandwidths(rank: int) -> tuple[float, float]:
    own = world.current()
    return own.costs.network.bandwidth, own.costs_for("cuda").host.bandwidth


def test_ranks_agree_on_them():
    given = '{"network": {"bandwidth": 12345}, "cuda": {"host": {"bandwidth": 678}}}'
    with GlooRanks(2, {"TRITONDT_COSTS": given}) as ranks:
        assert ranks.run(bandwidths) == [(12345.0, 678.0)] * 2
