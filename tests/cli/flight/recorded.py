"""Files as flight recorders would write them, made from few words."""

import dataclasses
import json

from tritondt.cli.flight import Entry, Flight

DONE = Entry(
    number=0,
    communicator="world",
    sequence=1,
    operation="S0 -> R",
    fingerprint=10,
    state="done",
    site="train.py:41 (step)",
    peer=-1,
    issued_at=1000.0,
    started_at=1000.0,
    ended_at=1000.1,
    error=None,
    sent_bytes=4,
    received_bytes=4,
)


def done(sequence, **fields):
    return dataclasses.replace(
        DONE, sequence=sequence, number=sequence, fingerprint=10 * sequence, issued_at=1000.0 + sequence, **fields
    )


def waiting(sequence, peer, **fields):
    return done(sequence, **{"state": "exchanging", "peer": peer, "ended_at": None} | fields)


def failed(sequence, error, **fields):
    return done(sequence, **{"state": "failed", "error": error, "ended_at": 1050.0} | fields)


def flight(rank, *entries, world_size=4, written_at=1100.0):
    return Flight(rank, world_size, "node", 100 + rank, written_at, "timeout", entries)


def as_file(found):
    """The JSON of a Flight, but for the time, which is written as text."""
    return json.dumps({"version": 1, **dataclasses.asdict(found), "written_at": "2026-11-21T10:00:00.000000+00:00"})
