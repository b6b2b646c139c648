"""Memory that is registered with a communicator once, and collectives through it, on the double of NCCL."""

import json
from typing import Any

import pytest
import torch

import tritondt as T
from tests.doubles.fake_nccl.library import build
from tests.harness.nccl_on_host import ranks_on
from tritondt.comm import world
from tritondt.errors import TransportError
from tritondt.nccl import NcclLibrary

SIZE, BYTES = 4, 1 << 16
# Collectives are taken wherever there are some, and through registered memory where that is large enough.
FAST = {"collectives": 2, "collective_speedup": 2, "copy_bandwidth": 1e15, "host": {"latency_s": 1e-9}}
PRICES = json.dumps({**FAST, "registered_bytes": BYTES, "registered_speedup": 1e3})
CALLS = ("all_gather", "reduce_scatter", "all_reduce")


class Noted:
    """A double of a communicator's native part that notes its calls of collectives and registrations."""

    def __init__(self, native: Any) -> None:
        self._native, self.calls = native, list[tuple[str, tuple[Any, ...]]]()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._native, name)
        if name not in (*CALLS, "register_window", "register_buffer"):
            return found

        def noted(*arguments: Any) -> Any:
            self.calls.append((name, arguments))
            return found(*arguments)

        return noted


def move(rank: int, mesh_shape: tuple[int, ...]) -> tuple[list[str], str, list[str]]:
    """Calls of NCCL for three redistributions, each twice; which memory they had; and the lines that explain them."""
    mesh = T.Mesh(mesh_shape)
    stays = (T.Replicate(),) * (len(mesh_shape) - 1)
    ranks = tuple(range(rank // mesh_shape[-1] * mesh_shape[-1], (rank // mesh_shape[-1] + 1) * mesh_shape[-1]))
    communicator: Any = world.current().communicator(ranks)
    watched = communicator._watched
    native, noted = watched.native, Noted(watched.native)
    watched.native = noted
    whole = torch.arange(96.0).reshape(8, 12)
    reasons = list[str]()
    try:
        for source, target in ((T.Shard(1), T.Replicate()), (T.Partial(), T.Replicate()), (T.Partial(), T.Shard(0))):
            for is_issued in (False, True):
                local = whole.clone()
                if isinstance(source, T.Shard):
                    local = local.chunk(len(ranks), 1)[rank - ranks[0]].contiguous()
                x = T.DTensor.from_local(local, mesh, (*stays, source), run_check=False)
                found = x.redistribute(placements=(*stays, target), async_op=is_issued).to_local()
                wanted = whole if isinstance(source, T.Shard) else whole * len(ranks)
                if isinstance(target, T.Shard):
                    wanted = wanted.chunk(len(ranks))[rank - ranks[0]]
                torch.testing.assert_close(found, wanted, rtol=0, atol=0)
            reasons.append(str(T.explain(x, (*stays, target))).splitlines()[-1])
        memory = watched._registered
        first, last = memory._memory.data_ptr(), memory._memory.data_ptr() + BYTES
        for name, arguments in noted.calls:
            if name in CALLS:
                assert all(first <= address < last for address in arguments[:2]), (name, arguments)
    finally:
        watched.native = native
    return [name for name, _ in noted.calls], memory.kind, reasons


@pytest.mark.parametrize(
    ("variables", "mesh_shape", "kind", "registrations"),
    [
        ({}, (SIZE,), "window", ["register_window"]),
        ({}, (2, 2), "window", ["register_window"]),  # each row registers memory of its own
        ({"FAKE_NCCL_SYMMETRIC": "0"}, (SIZE,), "buffer", ["register_window", "register_buffer"]),
        ({"FAKE_NCCL_VERSION": "22605"}, (SIZE,), "buffer", ["register_buffer"]),
    ],
    ids=["windows", "rows", "no-symmetric-memory", "nccl-2.26"],
)
def test_collectives_go_through_memory_that_is_registered_once(
    variables: dict[str, str], mesh_shape: tuple[int, ...], kind: str, registrations: list[str]
) -> None:
    # The double refuses to free what is registered, and to destroy a communicator that has registrations.
    with ranks_on("nccl", SIZE, TRITONDT_TIMEOUT="60", TRITONDT_COSTS=PRICES, **variables) as started:
        found = started.run(move, mesh_shape)
    for calls, found_kind, reasons in found:
        assert found_kind == kind
        assert calls[: calls.index("all_gather")] == registrations
        assert [name for name in calls if name in CALLS] == ["all_gather"] * 2 + ["all_reduce"] * 2 + [
            "reduce_scatter"
        ] * 2
        for name, reason in zip(("all_gather", "all_reduce", "reduce_scatter"), reasons, strict=True):
            assert reason.startswith(f"{name} of NCCL through registered memory: ")


def gather(rank: int, length: int) -> tuple[bool, str]:
    """Whether memory was registered for a gather of so many elements, and the form that was taken."""
    x = T.DTensor.from_local(torch.arange(float(length)).chunk(2)[rank], T.Mesh((2,)), [T.Shard(0)], run_check=False)
    torch.testing.assert_close(x.full_tensor(), torch.arange(float(length)), rtol=0, atol=0)
    communicator: Any = world.current().communicator((0, 1))
    return communicator._watched._registered is not None, str(T.explain(x, [T.Replicate()])).splitlines()[-1]


def test_what_is_longer_than_the_memory_goes_without() -> None:
    fits = BYTES // 6 - 512 // 4  # the whole and a half, of 4 bytes each
    with ranks_on("nccl", 2, TRITONDT_TIMEOUT="60", TRITONDT_COSTS=PRICES) as started:
        for was_registered, reason in started.run(gather, 2 * fits):
            assert not was_registered
            assert reason.startswith("all_gather of NCCL: ")
        for was_registered, _ in started.run(gather, fits // 2 * 2):
            assert was_registered


def abort_and_look(rank: int) -> tuple[bool, bool]:
    """Whether memory was registered before an abort, and whether it was given back when the abort had returned."""
    x = T.distribute_tensor(torch.arange(8.0), T.Mesh((2,)), [T.Shard(0)])
    x.full_tensor()
    communicator: Any = world.current().communicator((0, 1))
    memory = communicator._watched._registered
    was_registered = memory._memory is not None
    T.abort()
    return was_registered, memory._memory is None


def test_an_abort_gives_the_memory_back_when_it_has_returned() -> None:
    with ranks_on("nccl", 2, TRITONDT_TIMEOUT="60", TRITONDT_COSTS=PRICES) as started:
        assert started.run(abort_and_look) == [(True, True)] * 2


def refused(rank: int) -> str:
    x = T.DTensor.from_local(torch.arange(4.0), T.Mesh((2,)), [T.Shard(0)], run_check=False)
    with pytest.raises(TransportError) as found:
        x.full_tensor()
    T.abort()
    return str(found.value)


def test_a_registration_that_fails_says_what_is_allowed() -> None:
    failing = {"FAKE_NCCL_FAIL": "ncclMemAlloc:1"}
    with ranks_on("nccl", 2, TRITONDT_TIMEOUT="60", TRITONDT_COSTS=PRICES, **failing) as started:
        for text in started.run(refused):
            assert text.startswith(f"{BYTES} bytes were to be registered with NCCL for collectives, and were not: ")
            assert text.endswith('; allowed are prices with "registered_bytes": 0 (TRITONDT_COSTS)')


def test_the_double_frees_no_memory_that_is_registered() -> None:
    library = NcclLibrary(str(build()), None)
    native = library.init([library.unique_id()], 1, 0)
    address = library.allocate(4096)
    for register, end in (
        (lambda: native.register_buffer(address, 4096), native.deregister_buffer),
        (lambda: native.register_window(address, 4096), native.deregister_window),
    ):
        handle = register()
        with pytest.raises(RuntimeError, match="it is registered with a communicator"):
            library.free(address)
        end(handle)
    native.register_buffer(address, 4096)
    native.abort()
    library.free(address)


def test_the_double_destroys_no_communicator_that_has_registered_memory() -> None:
    library = NcclLibrary(str(build()), None)
    native = library.init([library.unique_id()], 1, 0)
    native.register_buffer(library.allocate(4096), 4096)
    with pytest.raises(RuntimeError, match="1 buffers or windows are registered still"):
        native.destroy()
