"""Transports of a user's own: the whole one of examples/, and what the table of transports refuses."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import tritondt as T
from tests.comm.transports.test_gloo_cases import CASES_PER_TEST, check_on
from tests.harness.gloo_ranks import Failure, GlooRanks
from tests.harness.own_transport import EXAMPLES, VARIABLE, find_examples, pipe_ranks
from tritondt.cli.main import main
from tritondt.comm import world
from tritondt.comm.transports import table
from tritondt.comm.transports.sockets import SocketCommunicator

SHAPE = (1025, 513)


@pytest.fixture(scope="module")
def ranks() -> Iterator[GlooRanks]:
    with pipe_ranks(4) as made:
        yield made


def kind_of_communicator(rank: int) -> str:
    return type(world.current().communicator((0, 1, 2, 3))).__name__


def test_ranks_exchange_over_the_transport_that_a_module_has(ranks: GlooRanks) -> None:
    assert ranks.run(kind_of_communicator) == ["PipeCommunicator"] * 4


@pytest.mark.parametrize("first_seed", range(400_000, 400_000 + 4 * CASES_PER_TEST, CASES_PER_TEST))
def test_random_redistributions(ranks: GlooRanks, first_seed: int) -> None:
    check_on(ranks, first_seed)


def lists_and_asynchronous_ones(rank: int) -> None:
    mesh = T.Mesh((4,))
    wholes = [torch.arange(7 * (n + 1)).view(7, n + 1) * (n + 1) for n in range(3)]
    given = [T.distribute_tensor(whole, mesh, [T.Shard(0)]) for whole in wholes]
    found = T.redistribute_many([(each, [T.Shard(1)]) for each in given])
    later = [each.redistribute(placements=[T.Replicate()], async_op=True) for each in found]
    for whole, each in zip(wholes, later, strict=True):
        torch.testing.assert_close(each.to_local(), whole, rtol=0, atol=0)


def test_lists_and_asynchronous_redistributions(ranks: GlooRanks) -> None:
    ranks.run(lists_and_asynchronous_ones)


def lose_a_peer(rank: int, culprit: int) -> None:
    """Moves messages longer than a pipe takes, until the peer is killed."""
    mesh, meta = T.Mesh((4,)), T.TensorMeta.contiguous(SHAPE)
    rows, columns = (T.DTensorSpec(mesh, [T.Shard(dim)], meta) for dim in (0, 1))
    local = torch.full(rows.local_shape, float(rank))
    for number in range(1_000_000):
        if rank == culprit and number == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        T.redistribute(local, rows, columns)


def test_a_killed_peer_is_named() -> None:
    with pipe_ranks(4, TRITONDT_TIMEOUT="120") as made:
        *others, dead = made.outcomes(lose_a_peer, 3, timeout_s=200)
        assert dead.kind == "died"
        for told in others:
            assert isinstance(told, Failure), told
            assert told.kind == "PeerError", told.trace
            assert "in step 1 of 1 (exchange (S0) -> (S1))" in told.text
        assert any(re.search("rank 3 closed its pipe while rank [012] waited for it", told.text) for told in others)


def have_no_transport(rank: int) -> str:
    if rank == 2:
        os.environ["TRITONDT_TRANSPORT"] = "sockets"
    with pytest.raises((T.PeerError, T.WorldError)) as error:
        T.distribute_tensor(torch.zeros(4), T.Mesh((3,)), [T.Shard(0)])
    return str(error.value)


@pytest.mark.extended
def test_ranks_of_two_transports_are_told() -> None:
    with pipe_ranks(3, TRITONDT_TIMEOUT="60") as made:
        for text in made.run(have_no_transport):
            assert re.search("messages of ranks 0,1,2 over (pipes|shared memory or sockets), rank", text), text
            assert text.count("set TRITONDT_TRANSPORT alike on all ranks") == 1


NAMES = "allowed are gloo, nccl, (pipes, )?shared-memory, sockets and MODULE:NAME of your own"


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        *((value, rf"TRITONDT_TRANSPORT='{value}' is set; {NAMES}") for value in ("pigeons", "", "a:", ":b")),
        ("no_such_module:X", r"TRITONDT_TRANSPORT='no_such_module:X' is set, but module 'no_such_module' cannot be "
         r"imported: No module named 'no_such_module'"),
        ("os:sep", r"TRITONDT_TRANSPORT='os:sep' is set, but 'sep' of module 'os' is '/'; allowed is a "
         r"tritondt\.Transport"),
    ],
)  # fmt: skip
def test_what_names_no_transport_is_refused(monkeypatch: pytest.MonkeyPatch, value: str, sentence: str) -> None:
    monkeypatch.setenv("TRITONDT_TRANSPORT", value)
    with pytest.raises(T.WorldError, match=f"^{sentence}$"):
        table.chosen("cpu")


def test_a_name_belongs_to_one_transport() -> None:
    find_examples()
    pipes: Any = table.named(VARIABLE)
    T.register_transport(pipes)  # once more is no other
    with pytest.raises(T.WorldError, match="transport 'pipes' is registered already; allowed is another name than "):
        T.register_transport(replace(pipes, communicator=SocketCommunicator))
    for name in ("", "a:b", "a b"):
        with pytest.raises(T.WorldError, match=f"a transport got the name {name!r}; allowed is a word without colons"):
            T.Transport(name, ("cpu",), SocketCommunicator)
    with pytest.raises(T.WorldError, match=r"transport 'x' carries tensors on no type of device; allowed is \(\"cpu"):
        T.Transport("x", (), SocketCommunicator)


def run_plan(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["plan", "--mesh", "4", "--shape", "8,4", "--from", "P", "--to", "R", *arguments])


def test_plan_knows_all_transports() -> None:
    find_examples()
    over_sockets, over_pipes = (run_plan("--transport", name).output for name in ("sockets", VARIABLE))
    assert over_pipes == over_sockets  # the built-in prices
    refused = run_plan("--transport", "pigeons")
    assert refused.exit_code == 1
    assert "--transport='pigeons' is set; allowed are gloo, nccl, pipes, shared-memory, sockets and" in refused.output
    wrong = run_plan("--transport", "gloo", "--device", "cuda")
    assert wrong.exit_code == 2
    assert "--transport gloo carries tensors on cpu, not on cuda; allowed for --device cuda are nccl" in wrong.output


@pytest.mark.extended
def test_doctor_tests_it_with_the_others() -> None:
    environment = {**os.environ, "TRITONDT_TRANSPORT": VARIABLE, "PYTHONPATH": f"{EXAMPLES}:{EXAMPLES.parent}"}
    command = [sys.executable, "-m", "tritondt", "doctor", "--seconds", "0"]
    found = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=280, env=environment, cwd=EXAMPLES.parent
    )
    assert re.search("^  pipes test +16 exchanges of 2 ranks were right", found.stdout, re.MULTILINE), found
    assert re.search("^  sockets test +16 exchanges of 2 ranks were right", found.stdout, re.MULTILINE), found
