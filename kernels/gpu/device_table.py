"""Tables of boxes on a device: made and uploaded once, then run by one launch.

The pointers of a run settle what a kernel may assume of addresses: how far each lies behind a multiple of 16 bytes. A
table has a variant for every combination of these distances that occurs, usually one; the first is made with the table.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import reduce
from operator import itemgetter, or_
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from triton import JITFunction
from triton.runtime.driver import driver

from tritondt.kernels.boxes import SCALE_BYTES
from tritondt.kernels.gpu.box_table import BoxTable, Pointer, box_table, by_pointers, chooser
from tritondt.kernels.gpu.loop_nest import LoopNest
from tritondt.kernels.gpu.pieces import WIDEST, Piece
from tritondt.kernels.gpu.side_by_side import Started
from tritondt.kernels.gpu.signals import MOST_PROGRAMS, num_lanes, signal_cells
from tritondt.kernels.gpu.specialization import DIMS, POINTERS, class_of, compiler_options, few_dims, rounded_up
from tritondt.kernels.gpu.tuning import DEFAULT, Choice, choose
from tritondt.kernels.signals import SlotTensors, check_slots

# Stands for a pointer when a kernel is compiled: 64 bits wide, and of no alignment that could be assumed.
_ANY_ADDRESS = (1 << 40) + 1
_MAX_VARIANTS = 16
# So many programs are no bound: nearly all tables have fewer tiles, and one form less is compiled.
UNBOUNDED = 1 << 24


class Kernel(NamedTuple):
    """A Triton kernel, its name in tuning.json, and its further arguments.

    `arguments` come behind table and pointers, `constants` are compiled in, `options` are the compiler's. The kernel is
    compiled for one of the classes of modes, `modes`; `width` is that of its widest units, as tuning.json has it.
    `registers` has bounds of registers for some architectures, see `compiler_options`.
    """

    function: Any
    name: str
    arguments: tuple[int, ...]
    constants: Mapping[str, Any]
    options: Mapping[str, Any]
    modes: tuple[int, ...]
    width: int = WIDEST
    registers: Mapping[int, int] = MappingProxyType({})

    def compiled_with(self, num_dims: int, num_warps: int, architecture: int | None) -> dict[str, Any]:
        """The compiler's options for an architecture such as 90; None stands for Triton's interpreter."""
        return compiler_options(self.options, self.registers, num_dims, num_warps, architecture)

    def with_signals(self, num_cells: int, num_lanes: int, *, by_store: bool) -> "Kernel":
        """The kernel of a table whose cells have signals behind them, with so many lanes for peers."""
        constants = {**self.constants, "NUM_LANES": num_lanes, "BY_STORE": by_store}
        return self._replace(arguments=(num_cells, *self.arguments), constants=constants)


# The tensor that holds the scales of boxes: a source of its own. Its offset in a nest counts bytes.
SCALES = -1


class Sides(NamedTuple):
    """Alignment of the addresses of targets and of sources, in bytes, and bytes in the unit that a nest counts in."""

    alignments: tuple[int, int] = (1, 1)
    units: tuple[int, int] = (1, 1)


class Form(NamedTuple):
    """The things a kernel is compiled for: a class of modes, room for loops and pointers, and units of a block.

    `is_bounded` where there may be fewer programs than tiles; kernels without IS_BOUNDED among their constants take
    both.
    """

    modes: int
    num_dims: int
    num_pointers: int
    block: int
    is_bounded: bool = False

    def constants(self, kernel: Kernel) -> dict[str, Any]:
        """All constants of the kernel, in the order of its arguments."""
        return {
            "NUM_POINTERS": self.num_pointers,
            "NUM_DIMS": self.num_dims,
            "MODES": self.modes,
            "BLOCK": self.block,
            **kernel.constants,
            **({"IS_BOUNDED": self.is_bounded} if "IS_BOUNDED" in kernel.constants else {}),
        }


def compile_form(
    kernel: Kernel, form: Form, num_warps: int, cells: Any, counts: tuple[int, int, int], grid: tuple[int, int, int]
) -> Any:
    """A kernel compiled in a form for the current device; None from Triton's interpreter.

    `cells` are a table's, or stand for them by their dtype; `counts` are of walks, bisections and tiles, of which only
    the type matters.
    """
    return kernel.function.warmup(
        cells,
        (_ANY_ADDRESS,) * form.num_pointers,
        *kernel.arguments,
        *counts,
        *form.constants(kernel).values(),
        grid=grid,
        **kernel.compiled_with(form.num_dims, num_warps, _architecture(kernel.function)),
    )


def _architecture(function: Any) -> int | None:
    """Architecture that a kernel is compiled for; None where nothing is compiled, as in Triton's interpreter."""
    if not isinstance(function, JITFunction):
        return None
    architecture: int = driver.active.get_current_target().arch
    return architecture


# What a captured graph reads at each replay. Nobody says when the last graph is deleted, so that it stays: some
# kilobytes for each table that was ever captured.
_IN_GRAPHS: set["Shared"] = set()


class Shared:
    """Numbers on a device that launches read on any stream, and graphs of them whenever they are replayed.

    It holds `slots`, whose stop words the launches read.
    """

    def __init__(
        self, numbers: Sequence[int], dtype: torch.dtype, device: torch.device, slots: SlotTensors | None = None
    ) -> None:
        self._slots = slots
        self.values = torch.tensor(numbers, dtype=dtype).to(device)
        self._number = self.values.device.index  # torch makes an object for every question
        self._streams: set[int] = set()

    def read_by_current_stream(self) -> int:
        """Handle of the current stream; the allocator keeps the numbers until that stream has read them.

        torch.cuda makes an object of it only once: that takes as long as a launch.
        """
        handle: int = torch._C._cuda_getCurrentRawStream(self._number)
        if torch._C._cuda_isCurrentStreamCapturing():
            _IN_GRAPHS.add(self)
        elif handle not in self._streams:
            self.values.record_stream(torch.cuda.current_stream(self.values.device))
            self._streams.add(handle)
        return handle


class Launch(Started):
    """One table on its device and the kernel compiled for it."""

    def __init__(
        self,
        kernel: Kernel,
        table: BoxTable,
        places: Sequence[int],
        device: torch.device,
        choice: Choice,
        signals: Sequence[int] = (),
        slots: SlotTensors | None = None,
    ) -> None:
        """`signals` are those of `slots`, for the kernels that have them."""
        self._cells = Shared([*table.cells, *signals], torch.int64, device, slots)
        self._device = device if device.type == "cuda" else None
        num_pointers = rounded_up(len(places), POINTERS)
        self._pointers_of = itemgetter(*places, *[places[0]] * (num_pointers - len(places)))
        counts = (table.num_walks, table.num_bisections, table.num_tiles)
        is_bounded = choice.max_ctas < max(table.num_tiles, UNBOUNDED)
        form = Form(class_of(table.modes, kernel.modes), table.num_dims, num_pointers, choice.block, is_bounded)
        self._arguments = (*kernel.arguments, *counts, *form.constants(kernel).values())
        grid = (min(table.num_tiles, choice.max_ctas), 1, 1)
        compiled = compile_form(kernel, form, choice.num_warps, self._cells.values, counts, grid)
        self._prepare(kernel.function, compiled, grid)
        self._address = self._cells.values.data_ptr()

    def run(self, addresses: tuple[int, ...]) -> None:
        """Launches on the device's current stream; `addresses` are multiples of 16, one per pointer of the table."""
        pointers = self._pointers_of(addresses)
        if self._device is None:
            self._start((self._cells.values, pointers, *self._arguments), None)
            return
        stream = self._cells.read_by_current_stream()
        self._start((self._address, pointers, *self._arguments), stream)


class DeviceTable(ABC):
    """Common part of tables of copies, casts and reductions; see DeviceCopyTable, DeviceCastTable,
    DeviceReduceTable.
    """

    def __init__(
        self,
        kernel: Kernel,
        nests: Sequence[LoopNest],
        device: torch.device,
        *,
        sides: Sides,
        is_aligned: bool,
        choice: Choice | None,
        max_ctas: int | None,
        slots: SlotTensors | None = None,
    ) -> None:
        if slots is not None:
            check_slots(slots)
            assert nests, "tables of slots move something, since peers wait for their launches"
        self._slots = slots
        self._device = resolved(device, kernel.function)
        self._number = self._device.index if self._device.type == "cuda" else None
        self._kernel, self.nests = kernel, tuple(nests)
        self._alignments = (*((WIDEST, WIDEST) if is_aligned else sides.alignments), SCALE_BYTES)
        self._units, self._is_aligned = (*sides.units, 1), is_aligned
        self._choice, self._max_ctas = choice, max_ctas
        self._used = tuple(
            dict.fromkeys(
                Pointer(number == 0, operand.tensor) for nest in nests for number, operand in enumerate(nest.operands)
            )
        )
        self._used_of = chooser(self._used)
        self._variants: dict[tuple[int, ...], tuple[Launch, ...]] = {}
        self._aligned = self._variant((0,) * len(self._used)) if nests else ()

    def run(self, source_ptrs: Sequence[int], target_ptrs: Sequence[int], num_threads: int = 1) -> None:
        """Runs every box on the tensors whose first elements lie at the given addresses, on the current stream.

        `num_threads` is for the CPU's tables, which this one stands in for.
        """
        try:  # as `prepared`, which is a call
            launches, addresses = self._aligned, self._used_of(source_ptrs, target_ptrs)
        except IndexError:
            raise self._missing(source_ptrs, target_ptrs) from None
        if 0 in addresses or reduce(or_, addresses, 0) % WIDEST:
            launches, addresses = self.prepared(source_ptrs, target_ptrs)
        if self._number is not None and torch._C._cuda_getDevice() != self._number:
            self.launch(launches, addresses)
            return
        for launch in launches:  # as `launch`, which is a call
            launch.run(addresses)

    def prepared(
        self, source_ptrs: Sequence[int], target_ptrs: Sequence[int]
    ) -> tuple[tuple[Launch, ...], tuple[int, ...]]:
        """Arguments of `launch`; ValueError where a pointer is missing or not what the table was made for."""
        try:
            addresses = self._used_of(source_ptrs, target_ptrs)
        except IndexError:
            raise self._missing(source_ptrs, target_ptrs) from None
        if not reduce(or_, addresses, 0) % WIDEST and 0 not in addresses:
            return self._aligned, addresses
        behind = tuple([address % WIDEST for address in addresses])
        launches = self._variants.get(behind)
        if launches is None or 0 in addresses:
            self._check(addresses)
            launches = self._variant(behind)
        return launches, tuple([address - past for address, past in zip(addresses, behind, strict=True)])

    def launch(self, launches: Sequence[Launch], addresses: tuple[int, ...]) -> None:
        """Launches on the current stream of the table's device."""
        if self._number is not None and torch._C._cuda_getDevice() != self._number:
            with torch.cuda.device(self._device):
                for launch in launches:
                    launch.run(addresses)
        else:
            for launch in launches:
                launch.run(addresses)

    @property
    def device(self) -> torch.device:
        """Device on which the table lies."""
        return self._device

    @property
    def num_boxes(self) -> int:
        """Number of boxes that hold anything."""
        return len(self.nests)

    @property
    def num_dims(self) -> int:
        """Greatest number of loops around a run of bytes."""
        return max((len(nest.lengths) - (nest.run_bytes > 1) for nest in self.nests), default=0)

    @property
    def num_launches(self) -> int:
        """Number of kernels that one run launches: one, but for tiles beside runs, or very many tensors."""
        return max(map(len, self._variants.values()), default=0)

    @abstractmethod
    def pieces(self, nests: Iterable[LoopNest]) -> list[Piece]:
        """Pieces of some nests, with offsets in bytes."""

    def _check(self, addresses: Sequence[int]) -> None:
        for pointer, address in zip(self._used, addresses, strict=True):
            alignment = self._alignments[_side(pointer)]
            if address == 0 or address % alignment:
                made_for = "; the table was made for aligned tensors only" if self._is_aligned else ""
                raise ValueError(
                    f"a box uses {_name(pointer)}, whose address is {address}; it must be a multiple of {alignment} "
                    f"and not null{made_for}"
                )

    def _missing(self, source_ptrs: Sequence[int], target_ptrs: Sequence[int]) -> ValueError:
        for pointer in self._used:
            given = len(target_ptrs if pointer.is_target else source_ptrs)
            if pointer.tensor >= given:
                side = "target" if pointer.is_target else "source"
                return ValueError(f"a box uses {_name(pointer)}, but the number of pointers in {side}_ptrs is {given}")
        raise AssertionError(f"no pointer is missing among {source_ptrs} and {target_ptrs}")

    def _variant(self, behind: tuple[int, ...]) -> tuple[Launch, ...]:
        """Launches for tensors that start so many bytes behind multiples of 16."""
        past = {
            pointer: num_bytes // self._units[_side(pointer)]
            for pointer, num_bytes in zip(self._used, behind, strict=True)
        }
        shifted = [
            nest._replace(
                operands=tuple(
                    operand._replace(offset=operand.offset + past[Pointer(number == 0, operand.tensor)])
                    for number, operand in enumerate(nest.operands)
                )
            )
            for nest in self.nests
        ]
        places = {pointer: place for place, pointer in enumerate(self._used)}
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            groups = by_pointers(self.all_pieces(shifted))
            launches = tuple(
                self._launch(
                    *(pointers, pieces, [places[pointer] for pointer in pointers]),
                    awaits=number == 0,
                    publishes=number == len(groups) - 1,
                )
                for number, (pointers, pieces) in enumerate(groups)
            )
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # other streams may run it next
        if len(self._variants) >= _MAX_VARIANTS:
            self._variants.pop(next(iter(self._variants)))
        self._variants[behind] = launches
        return launches

    def all_pieces(self, nests: Iterable[LoopNest]) -> list[Piece]:
        """Pieces of some nests, of few dims where that takes few pieces more."""
        found = list[Piece]()
        for nest in nests:
            pieces = self.pieces([nest])
            num_dims = max((len(piece.lengths) for piece in pieces), default=0)
            found += pieces if num_dims <= DIMS[0] else self.pieces(few_dims(nest, num_dims))
        return found

    def _launch(
        self,
        pointers: Sequence[Pointer],
        pieces: Sequence[Piece],
        places: Sequence[int],
        *,
        awaits: bool,
        publishes: bool,
    ) -> Launch:
        num_dims = rounded_up(max(len(piece.lengths) for piece in pieces), DIMS)
        choice = self._choice or self._tuned(num_dims)
        if self._max_ctas is not None:
            choice = choice._replace(max_ctas=min(choice.max_ctas, self._max_ctas))
        table = box_table(pointers, pieces, choice.block, num_dims)
        if self._slots is None:
            return Launch(self._kernel, table, places, self._device, choice)
        choice = choice._replace(max_ctas=min(choice.max_ctas, MOST_PROGRAMS))
        numbers = [(pointer.is_target, pointer.tensor) for pointer in pointers]
        num_pointers = rounded_up(len(places), POINTERS)
        cells = signal_cells(self._slots, numbers, num_pointers, awaits=awaits, publishes=publishes)
        # The interpreter takes no PTX; to memory of the host an exchange is the same.
        by_store = self._slots.signals.by_store and self._number is not None
        lanes = num_lanes(len(self._slots.signals.peers), choice.num_warps)
        kernel = self._kernel.with_signals(len(table.cells), lanes, by_store=by_store)
        return Launch(kernel, table, places, self._device, choice, cells, self._slots)

    def _tuned(self, num_dims: int) -> Choice:
        """Tuned choice for the widest units: all widths are in one kernel."""
        name = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else DEFAULT
        return choose(name, self._kernel.name, self._kernel.width, num_dims)


def resolved(device: torch.device, function: Any) -> torch.device:
    """Device with its number, on which a kernel runs; ValueError where it does not."""
    if device.type == "cuda":
        return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
    if "interpreter" not in type(function).__module__:
        raise ValueError(
            f"a device table on {device}; Triton's kernels run on cuda, and on cpu only in Triton's interpreter"
        )
    return device


def _side(pointer: Pointer) -> int:
    """Number of the side of a pointer: 0 of targets, 1 of sources, 2 of scales."""
    return 2 if pointer.tensor == SCALES else int(not pointer.is_target)


def _name(pointer: Pointer) -> str:
    if pointer.tensor == SCALES:
        return "scales"
    return f"{'target' if pointer.is_target else 'source'} {pointer.tensor}"
