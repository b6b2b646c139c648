"""The parts that `bench redistribute --breakdown` times: what they move, what they leave out, and their figures."""

import threading
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import tritondt as T
from tritondt.cli.bench.breakdown import CSV_COLUMNS, PEAK_MESSAGE_BYTES, Breakdown, parts_of, peak_runs
from tritondt.cli.bench.harness import Times
from tritondt.cli.main import main
from tritondt.comm import world
from tritondt.comm.communicator import Traffic
from tritondt.comm.transports.threads import run_ranks
from tritondt.kernels import tables
from tritondt.sharding.placement import parse_placements


def moved(run: Any) -> Traffic:
    """Traffic of a run on the communicator of the ranks 0 to 2."""
    traffic = world.current().communicator((0, 1, 2), "cpu").traffic
    before = replace(traffic)
    run()
    return Traffic(*(getattr(traffic, name) - getattr(before, name) for name in Traffic.__slots__))


@pytest.mark.parametrize("pair", ["S0->S1", "S0->R", "P->R", "P->S1", "R->S0"])
def test_the_messages_alone_are_those_of_the_whole_and_the_local_work_has_none(pair):
    def body(rank: int) -> tuple[Traffic, Traffic, Traffic]:
        before, after = (parse_placements(text) for text in pair.split("->"))
        meta = T.TensorMeta.contiguous((7, 5))
        source, target = (T.DTensorSpec(T.Mesh((3,)), found, meta) for found in (before, after))
        local = torch.ones(source.local_shape)
        alone, messages = parts_of(local, source, target)
        return moved(lambda: T.redistribute(local, source, target)), moved(messages), moved(alone)

    for whole, messages, alone in run_ranks(3, body):
        assert messages == whole
        assert alone == Traffic()
    assert (whole.sent_bytes > 0) is (pair != "R->S0")


def test_the_local_work_runs_every_table_of_the_whole(monkeypatch):
    calls: dict[int, list[int]] = defaultdict(list)
    module: Any = tables
    for kind in (module.CopyTable, module.ReduceTable):
        real = kind.run

        def counted(self: Any, *arguments: Any, real: Any = real) -> None:
            calls[threading.get_ident()].append(self.num_bytes)
            real(self, *arguments)

        monkeypatch.setattr(kind, "run", counted)

    def body(rank: int) -> tuple[list[int], list[int]]:
        meta, own = T.TensorMeta.contiguous((8, 6)), calls[threading.get_ident()]
        source, target = (T.DTensorSpec(T.Mesh((2,)), (placement,), meta) for placement in (T.Partial(), T.Shard(1)))
        local = torch.ones(source.local_shape)
        alone, _ = parts_of(local, source, target)
        own.clear()
        T.redistribute(local, source, target)
        whole = list(own)
        own.clear()
        alone()
        return whole, own

    for whole, alone in run_ranks(2, body):
        assert whole == alone
        assert len(whole) == 2  # the other's columns are packed, and the own ones reduced


def test_the_peak_is_of_messages_among_all_ranks():
    def body(rank: int) -> dict[int, Traffic]:
        communicator = world.current().communicator((0, 1, 2), "cpu")
        return {num_bytes: moved(run) for num_bytes, run in peak_runs(communicator, rank).items()}

    for found in run_ranks(3, body):
        assert list(found) == [2 * num_bytes for num_bytes in PEAK_MESSAGE_BYTES]
        assert all(traffic == Traffic(num_bytes, num_bytes, 2, 2) for num_bytes, traffic in found.items())


@pytest.mark.parametrize(
    ("local", "messages", "whole", "share"), [(2, 4, 6, 0.0), (2, 4, 4, 1.0), (2, 4, 7, 0.0), (0, 4, 4, None)]
)
def test_the_share_that_is_hidden(local, messages, whole, share):
    found = Breakdown(Times((local,)), Times((messages,)), Times((whole,)), 1.0, 1)
    assert found.hidden_share == share


def test_the_row_of_a_case():
    parts = Breakdown(Times((1e-3,)), Times((2e-3,)), Times((2.5e-3,)), 4e6, 6000)
    assert parts.cells() == ["2.500", "1.000", "2.000", "50%", "60", "0.00"]
    assert parts.fields()["share_of_peak"] == pytest.approx(0.6)
    assert set(parts.columns()) == set(CSV_COLUMNS)


def test_a_transport_of_one_call_is_not_broken_down(monkeypatch):
    monkeypatch.setenv("TRITONDT_TRANSPORT", "shared-memory")
    ended = CliRunner().invoke(main, ["bench", "redistribute", "--breakdown"])
    assert ended.exit_code == 2
    assert (
        "--breakdown measures the sockets; TRITONDT_TRANSPORT=shared-memory is set, allowed is sockets" in ended.output
    )
