"""Built-in prices by the type of the device that tensors are on, and prices that programs or calibrations set instead.

Prices of the CPU are measured, for ranks that share a machine. Prices of a GPU are for an H100 SXM, from published
figures: none of these has been measured on an H100. `python -m tritondt bench calibrate` measures prices where they are
used.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from tritondt.planning.collectives import WIDE
from tritondt.planning.cost import CostTable, Link

CPU = CostTable()
# Of ranks that read each other's messages in shared memory, an exchange waits for the scheduler, not for bytes.
_SHARED_MEMORY_ONE_SHOT_BYTES = 1 << 18
CUDA = CostTable(
    # HBM3 of 3.35 TB/s (H100 datasheet), which a copy within a device reads and writes.
    device=Link(2e-6, 1.6e12, busy_share=0.25),
    # NVLink 4: 450 GB/s each way (H100 datasheet), two thirds of it a guess. Send and receive launch up to 32 blocks
    # (NCCL issue 2421) on 132 processors: a quarter of them.
    host=Link(2e-6, 300e9, busy_share=0.25),
    # InfiniBand NDR, 400 Gb/s a GPU (DGX H100 datasheet): 50 GB/s, nine tenths of it a guess; latencies are guesses.
    network=Link(8e-6, 45e9, busy_share=0.05),
    # Half of HBM3's 3.35 TB/s at nine tenths: each byte is read and written.
    copy_bandwidth=1.5e12,
    # Some milliseconds for the exchange of handles, a guess.
    first_connection_s=5e-3,
    # bfloat16 without sparsity: 989 Tflop/s (H100 datasheet), of which a large matmul reaches some six tenths, a guess.
    flop_rate=6e14,
    # HBM3 at nine tenths, a guess.
    operator_bandwidth=3e12,
    # A pack, a group of messages and an unpack, each some 5 us from launch to end, a guess.
    launch_s=15e-6,
    one_shot_bytes=1 << 18,
    # The same NVLink, over which one kernel packs for all peers; its signals are in the launch below.
    slots=Link(0.2e-6, 300e9, busy_share=0.25),
    # A pack, an unpack and two signals, some 3 us each, a guess.
    slot_launch_s=12e-6,
    # Sums of 16 bits stay as they are everywhere: added in fp32 and rounded once.
    collectives=WIDE,
    # One kernel and nothing packed, a guess.
    collective_launch_s=5e-6,
    # A stage takes a launch more, which small transfers do not win back.
    stages_by_time=1,
)


def built_in(ranks_per_host: int) -> dict[str, CostTable]:
    """Built-in tables by the type of device, for so many ranks on each host, whose messages go over sockets or NCCL.

    >>> built_in(8)["cpu"].ranks_per_host, built_in(8)["cpu"].one_shot_bytes
    (8, 0)
    """
    return {name: replace(table, ranks_per_host=ranks_per_host) for name, table in (("cpu", CPU), ("cuda", CUDA))}


def in_shared_memory(table: CostTable, arena_bytes: int) -> CostTable:
    """Prices of processes that read each other's messages in shared memory, of which so much belongs to each rank.

    >>> in_shared_memory(CPU, 1 << 20).one_shot_bytes
    262144
    """
    return replace(table, one_shot_bytes=_SHARED_MEMORY_ONE_SHOT_BYTES, arena_bytes=arena_bytes)


def in_slots(table: CostTable, arena_bytes: int) -> CostTable:
    """Prices of ranks that pack messages into each other's GPU memory, of which so much of each GPU is for that.

    >>> in_slots(CUDA, 1 << 20).device_arena_bytes
    1048576
    """
    return replace(table, device_arena_bytes=arena_bytes)


def with_prices(tables: Mapping[str, CostTable], text: str) -> dict[str, CostTable]:
    """Tables with the prices of a JSON object, those under a type of device for that one; ValueError for no prices.

    >>> tables = with_prices(built_in(8), '{"max_peers": 64, "cuda": {"host": {"bandwidth": 2e11}}}')
    >>> tables["cpu"].max_peers, tables["cpu"].host.bandwidth, tables["cuda"].max_peers, tables["cuda"].host.bandwidth
    (64, 2000000000.0, 64, 200000000000.0)
    """
    prices: Any = json.loads(text)
    own = {name: prices.pop(name) for name in tables if name in prices} if isinstance(prices, dict) else {}
    found = {name: table.with_prices(prices) for name, table in tables.items()}
    return {name: table.with_prices(own.get(name, {})) for name, table in found.items()}


def to_json(tables: Mapping[str, CostTable]) -> str:
    """Text of the tables, the form in which ranks agree on them."""
    return json.dumps({name: asdict(table) for name, table in tables.items()}, sort_keys=True)


def from_json(text: str) -> dict[str, CostTable]:
    """Tables that `to_json` wrote."""
    return {name: CostTable().with_prices(prices) for name, prices in json.loads(text).items()}
