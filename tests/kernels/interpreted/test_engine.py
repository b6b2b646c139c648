"""The engine with Triton's kernels, interpreted, in place of the CPU's: packs, unpacks, keeps and reductions."""

from math import prod

import pytest
import torch
from torch.testing import assert_close

import tritondt as T
from tests.harness.doubled import doubled
from tests.harness.oracle.cases import check_cases, random_case
from tritondt.comm.transports.threads import run_ranks
from tritondt.kernels.gpu import device_table
from tritondt.kernels.gpu.device_table import DeviceTable
from tritondt.kernels.tables import CppMaker, TritonMaker, copy_table
from tritondt.planning.cost import CostTable

# numpy, which interprets the kernels, warns of the infinities that a max or min starts from.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


class CountingMaker(TritonMaker):
    """Triton's tables, counted by what they do."""

    def __init__(self):
        self.num_copies = self.num_casts = self.num_reductions = 0

    def copy_table(self, boxes, device, slots=None):
        self.num_copies += 1
        return super().copy_table(boxes, device, slots)

    def cast_table(self, boxes, source_dtype, target_dtype, device):
        self.num_casts += 1
        return super().cast_table(boxes, source_dtype, target_dtype, device)

    def quantize_table(self, boxes, source_dtype, target_dtype, device):
        self.num_casts += 1
        return super().quantize_table(boxes, source_dtype, target_dtype, device)

    def dequantize_table(self, boxes, source_dtype, target_dtype, device):
        self.num_casts += 1
        return super().dequantize_table(boxes, source_dtype, target_dtype, device)

    def reduce_table(self, boxes, op, dtype, divisor, device, slots=None):
        self.num_reductions += 1
        return super().reduce_table(boxes, op, dtype, divisor, device, slots)


@pytest.fixture
def maker():
    counting = CountingMaker()
    with doubled("cpu", table_maker=counting):
        yield counting


@pytest.fixture
def launches(monkeypatch):
    """Launches that were made, and how often they ran."""
    counted = {"made": 0, "run": 0}
    make, run = device_table.Launch.__init__, device_table.Launch.run

    def making(*args):
        counted["made"] += 1
        make(*args)

    def running(*args):
        counted["run"] += 1
        run(*args)

    monkeypatch.setattr(device_table.Launch, "__init__", making)
    monkeypatch.setattr(device_table.Launch, "run", running)
    return counted


@pytest.mark.parametrize("chunk", range(4))
def test_random_redistributions(chunk, maker):
    world_size = (4, 6, 5, 8)[chunk % 4]
    seeds = range(700_000 + 12 * chunk, 700_012 + 12 * chunk)
    check_cases([random_case(seed, world_size) for seed in seeds], world_size)
    assert maker.num_copies > 10
    assert maker.num_reductions > 0


def test_in_several_hops(maker):
    check_cases([random_case(seed, 8) for seed in range(710_000, 710_010)], 8, CostTable(max_peers=1))
    assert maker.num_copies > 0


def redistribute_repeatedly(source, target, num_times):
    """What ranks get the last time; every time all elements are 1 larger than before."""

    def body(rank):
        mesh, meta = T.Mesh((4,)), T.TensorMeta.contiguous((7, 10))
        before, after = (T.DTensorSpec(mesh, T.parse_placements(text), meta) for text in (source, target))
        local = torch.arange(float(prod(before.local_shape))).view(before.local_shape)
        for time in range(num_times):
            result = T.redistribute(local + time, before, after)
        return result

    return run_ranks(4, body)


@pytest.mark.parametrize(
    ("source", "target"), [("S0", "S1"), ("S1", "R"), ("R", "S1"), ("P(sum)", "S1"), ("P(max)", "R")]
)
def test_tables_are_made_with_the_plan_and_never_again(source, target, maker, launches):
    first = redistribute_repeatedly(source, target, 1)
    made = dict(launches)
    launches.update(made=0, run=0)
    last = redistribute_repeatedly(source, target, 4)
    assert launches["made"] == made["made"] > 0
    assert launches["run"] == 4 * made["run"] > 0
    for before, after in zip(first, last, strict=True):
        assert_close(after, before + (12 if source == "P(sum)" else 3), rtol=0, atol=0)


@pytest.mark.parametrize("wire_dtype", [torch.bfloat16, torch.float8_e5m2])
@pytest.mark.parametrize(("source", "target"), [("S0", "S1"), ("S1", "R"), ("P(sum)", "S1"), ("P(avg)", "R")])
def test_messages_of_another_dtype(source, target, wire_dtype, maker):
    generator = torch.Generator().manual_seed(9)
    whole = torch.randn(7, 10, generator=generator) * 2.0 ** torch.randint(-140, 120, (7, 10), generator=generator)

    def body(rank):
        mesh, meta = T.Mesh((4,)), T.TensorMeta.contiguous((7, 10))
        before, after = (T.DTensorSpec(mesh, T.parse_placements(text), meta) for text in (source, target))
        local = T.DTensor.from_local(whole, mesh, [T.Replicate()]).redistribute(placements=before.placements).to_local()
        return T.redistribute(local, before, after, wire_dtype=wire_dtype)

    found = run_ranks(4, body)
    assert maker.num_casts > 4
    with doubled("cpu", table_maker=CppMaker()):
        for ours, expected in zip(found, run_ranks(4, body), strict=True):
            assert_close(ours, expected, rtol=0, atol=0)


def test_distributing_a_tensor(maker):
    whole = torch.arange(77.0).view(7, 11)

    def body(rank):
        mesh = T.Mesh((4,))
        return T.distribute_tensor(whole, mesh, [T.Shard(1)]).to_local()

    assert_close(torch.cat(run_ranks(4, body), 1), whole, rtol=0, atol=0)
    assert maker.num_copies > 0


def test_the_cpu_gets_its_own_tables_back():
    cpu = torch.device("cpu")
    with doubled("cpu", table_maker=TritonMaker()):
        assert isinstance(copy_table([], cpu), DeviceTable)
    assert not isinstance(copy_table([], cpu), DeviceTable)
