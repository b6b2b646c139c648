"""Exchanges over NCCL as programs of the extension: what is looked at once a plan, and what is done each time.

A program is for tensors of the fields that it was made with, by DLPack's C exchange API; another tensor is told from
these before anything is done, and goes the general way, part by part, which refuses it or compiles for it. Tensors of a
torch without that API always go there (it came with 2.10).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from tritondt._C import ExchangeProgram, NcclCommunicator
from tritondt.comm.monitor.flight import ExchangeRecord
from tritondt.comm.nccl.stream_engine import StreamEngine
from tritondt.comm.packing.packed_transfer import PackedTransfer, buffer_places
from tritondt.comm.work import run_at_once
from tritondt.planning.alignment import Alignment

# Classes of tensors whose memory holds their values.
PLAIN = (torch.Tensor, torch.nn.Parameter)
_Launch = tuple[Callable[..., object], str, str]


class Issuer(NamedTuple):
    """The things of a communicator that its programs go by; `label` is its name as the flight recorder knows it."""

    engine: StreamEngine
    native: NcclCommunicator
    launch: Callable[..., object]
    label: int
    alignment: Alignment


class StreamProgram(NamedTuple):
    """A program, what it was compiled from, and the bytes of memory that its messages take."""

    native: ExchangeProgram
    plan: PackedTransfer
    record: ExchangeRecord
    num_bytes: int


def has_program(plan: PackedTransfer) -> bool:
    """Whether a plan can be a program: it has messages, of the tensors' own dtype, and no collective of NCCL."""
    return plan.casting is None and plan.collective is None and bool(plan.sends or plan.receives)


def exchange_program(
    issuer: Issuer,
    plan: PackedTransfer,
    record: ExchangeRecord,
    sources: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
) -> StreamProgram | None:
    """A plan, for which `has_program`, as a program for tensors alike; None where their fields are not to be had."""
    launch = None if issuer.launch is run_at_once else issuer.launch
    made = ExchangeProgram(issuer.engine, issuer.native, record.recorder, PLAIN, launch)
    if not made.set_tensors(sources, targets, issuer.alignment.in_place):
        return None
    made.set_operation(record.text, record.fingerprint, issuer.label, record.label, record)
    slices = plan.receives, plan.sends
    made.set_messages(plan.sends.native, plan.receives.native, slices, plan.sent_bytes, plan.received_bytes)
    packed_at, _, num_bytes = buffer_places(plan.staged_bytes, plan.packed_bytes, None)
    before, after = _launches(plan)
    made.set_launches(before, after, plan.pack is not None, plan.keep is not None, packed_at)
    return StreamProgram(made, plan, record, num_bytes)


def _launches(plan: PackedTransfer) -> tuple[list[_Launch], list[_Launch]]:
    """Launches before the messages and after them; see `ExchangeProgram.set_launches` for the letters."""
    before, after = list[_Launch](), list[_Launch]()
    if plan.pack is not None:
        before.append((plan.pack.run, "s", "pt" if plan.joint == "pack" else "p"))
    if plan.keep is not None:
        after.append((plan.keep.run, "s", "t"))
    if plan.unpack is not None:
        after.append((plan.unpack.run, "rs" if plan.joint == "unpack" else "r", "t"))
    return before, after + [(table.run, "sr", "t") for table in plan.reduces]
