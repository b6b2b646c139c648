"""Division of kernels into programs, as found to be fastest, device by device: tuning.json beside this file."""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

PATH = Path(__file__).with_name("tuning.json")
DEFAULT = "default"


class Choice(NamedTuple):
    """Division of a launch: up to `max_ctas` programs of 32 * `num_warps` threads, each moving `block` units at a
    time.
    """

    block: int
    num_warps: int
    max_ctas: int


class Entry(NamedTuple):
    """A choice for pieces of one unit width in bytes, and of up to so many dims."""

    width: int
    max_dims: int
    choice: Choice


def choose(device_name: str, kernel: str, width: int, num_dims: int) -> Choice:
    """Choice recorded for a device, or else for all.

    `kernel` is copy, cast, cast to float64, or reduce with the bytes of an element behind it; the width of a cast
    counts elements.

    >>> choose("a device that nobody has tuned for", "copy", 16, 2) == choose("default", "copy", 16, 2)
    True
    """
    recorded = _recorded()
    for name in (device_name, DEFAULT):
        entries = recorded.get(name, {}).get(kernel, ())
        fitting = [entry for entry in entries if entry.width == width and entry.max_dims >= num_dims]
        if fitting:
            return min(fitting, key=lambda entry: entry.max_dims).choice
    raise LookupError(f"{PATH} has no default for kernel {kernel!r}, width {width} and {num_dims} dims")


def record(device_name: str, kernels: Mapping[str, Sequence[Entry]], path: Path = PATH) -> None:
    """Writes the choices found for a device into a file, in place of those that it has of these kernels there."""
    found = json.loads(path.read_text()) if path.exists() else {}
    found[device_name] = found.get(device_name, {}) | {
        kernel: [{"width": entry.width, "max_dims": entry.max_dims, **entry.choice._asdict()} for entry in entries]
        for kernel, entries in kernels.items()
    }
    path.write_text(_text(found))
    forget()


def forget() -> None:
    """Makes the next choice read the file again."""
    _recorded.cache_clear()


def _text(found: Mapping[str, Mapping[str, Sequence[Any]]]) -> str:
    """JSON with a line per entry."""
    devices = []
    for device, kernels in found.items():
        listed = [
            f"    {json.dumps(kernel)}: [\n" + ",\n".join(f"      {json.dumps(entry)}" for entry in entries) + "\n    ]"
            for kernel, entries in kernels.items()
        ]
        devices.append(f"  {json.dumps(device)}: {{\n" + ",\n".join(listed) + "\n  }")
    return "{\n" + ",\n".join(devices) + "\n}\n"


@lru_cache(maxsize=1)
def _recorded() -> dict[str, dict[str, tuple[Entry, ...]]]:
    return {
        device: {
            kernel: tuple(
                Entry(found["width"], found["max_dims"], Choice(found["block"], found["num_warps"], found["max_ctas"]))
                for found in entries
            )
            for kernel, entries in kernels.items()
        }
        for device, kernels in json.loads(PATH.read_text()).items()
    }
