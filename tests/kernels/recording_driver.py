"""A test double of Triton's driver: kernels are compiled for an H100, and launches are recorded in place of run."""

from types import SimpleNamespace
from typing import Any

from triton.backends.compiler import GPUTarget

STREAM = 77


class RecordingDriver:
    """What Triton asks of a driver between a call of a kernel and its launch."""

    def __init__(self) -> None:
        self.launches: list[dict[str, Any]] = []
        recorded = self.launches

        class Launcher:
            def __init__(self, source: Any, metadata: Any) -> None:
                self.names = source.fn.arg_names

            def __call__(self, x: int, y: int, z: int, stream: int, *others: Any) -> None:
                arguments = dict(zip(self.names, others[-len(self.names) :], strict=True))
                recorded.append({"grid": (x, y, z), "stream": stream, **arguments})

        self.launcher_cls = Launcher
        self.utils = SimpleNamespace(
            load_binary=lambda *_: (0, 0, 32, 0, 1024),
            unload_module=lambda _: None,  # Triton 3.9 asks for it where a kernel goes
            get_device_properties=lambda _: {"max_shared_mem": 1 << 17},
        )

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """A stream that nobody has made."""
        return STREAM

    def get_current_target(self) -> GPUTarget:
        """An H100."""
        return GPUTarget("cuda", 90, 32)
