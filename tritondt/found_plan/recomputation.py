"""Blocks that compute their activations again in backward, by torch's checkpoints, in place of keeping them."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tritondt.found_plan.recording import Recording
from tritondt.found_plan.repeated_blocks import RepeatedBlocks


def recompute(model: nn.Module, names: Sequence[str]) -> None:
    """Puts the modules `names` into checkpoints, which keep what they take in alone.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> recompute(model, ["0"])
    >>> [type(module).__name__ for module in model]
    ['CheckpointWrapper', 'ReLU']
    """
    for name in names:
        model.set_submodule(name, checkpoint_wrapper(model.get_submodule(name)))


def recomputing_code(names: Sequence[str]) -> list[str]:
    """Lines of Python that do the same: a loop for each run of neighbours in a list.

    >>> print("\\n".join(recomputing_code(["blocks.0", "blocks.1"])))
    for name in [f"blocks.{index}" for index in range(0, 2)]:
        model.set_submodule(name, checkpoint_wrapper(model.get_submodule(name)))
    """
    runs: list[tuple[str, int, int]] = []
    for name in names:
        parent, dot, last = name.rpartition(".")
        index = int(last)
        if runs and runs[-1][0] == parent + dot and runs[-1][2] == index:
            runs[-1] = (parent + dot, runs[-1][1], index + 1)
        else:
            runs.append((parent + dot, index, index + 1))
    lines = []
    for prefix, start, end in runs:
        lines.append(f'for name in [f"{prefix}{{index}}" for index in range({start}, {end})]:')
        lines.append("    model.set_submodule(name, checkpoint_wrapper(model.get_submodule(name)))")
    return lines


class BlockKind(NamedTuple):
    """Blocks that are alike: the name of the one in the stand-in, and the names of all in the model."""

    stand_in: str
    names: tuple[str, ...]


def block_kinds(model: nn.Module, recording: Recording, *, is_truncated: bool) -> tuple[list[BlockKind], list[str]]:
    """Kinds of repeated blocks that can run twice in a step, and why others cannot.

    `recording` is that of one block of each kind where it `is_truncated`, and of the whole model otherwise.
    """
    blocks, kinds, notes = RepeatedBlocks(model), list[BlockKind](), list[str]()
    num_names = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    for listed, kept in blocks.kept().items():
        for place, index in enumerate(kept):
            first, number = f"{listed}.{index}".lstrip("."), place if is_truncated else index
            stand_in = f"{listed}.{number}".lstrip(".")
            names = tuple(name for name in blocks.all_alike(first) if num_names[id(model.get_submodule(name))] == 1)
            written = next((name for name in sorted(recording.written) if name.startswith(f"{stand_in}.")), None)
            if written is not None:
                buffer = written.removeprefix(f"{stand_in}.")
                notes.append(f"{blocks.pattern(first)} is not recomputed: its forward writes to its buffer {buffer}")
            elif recording.num_calls[stand_in] and names:
                kinds.append(BlockKind(stand_in, names))
    return kinds, notes


def fewest(number: int, most_bytes: Callable[[int], int], bound: int) -> int | None:
    """The least of 1 to `number` blocks with which a step keeps within the bound; None where none does.

    Memory falls by about as much with each block, so that few of them are asked for.

    >>> asked = []
    >>> def memory(blocks):
    ...     asked.append(blocks)
    ...     return 1000 - 10 * blocks
    >>> fewest(80, memory, 475), asked
    (53, [0, 80, 53, 52])
    """
    low, high = 0, number
    above, below = most_bytes(low), most_bytes(high)
    if below > bound:
        return None
    while high - low > 1:
        share = (above - bound) / (above - below)
        middle = min(max(low + -int(-share * (high - low) // 1), low + 1), high - 1)
        found = most_bytes(middle)
        if found <= bound:
            high, below = middle, found
        else:
            low, above = middle, found
    return high
