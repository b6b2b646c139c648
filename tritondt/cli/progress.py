"""A line on the terminal about what is being measured, after two seconds; nothing where there is no terminal."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType

_FIRST_S = 2.0
_INTERVAL_S = 0.5
_ERASE = "\r\x1b[K"


class ProgressLine:
    """Context manager that shows on stderr what `tell` was told last, and for how long it has run in all."""

    def __init__(self) -> None:
        self._stream = sys.stderr
        self._is_shown = self._stream.isatty()
        self._text, self._started = "", time.monotonic()
        self._end, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._show, daemon=True)

    def __enter__(self) -> ProgressLine:
        if self._is_shown:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        if self._is_shown:
            self._thread.join()
            self.erase()

    def tell(self, text: str) -> None:
        """Sets the text of the line: the work that is done now."""
        self._text = text

    def erase(self) -> None:
        """Clears the line, so that something else can be printed; it comes back by itself."""
        if self._is_shown:
            with self._lock:
                self._stream.write(_ERASE)
                self._stream.flush()

    def _show(self) -> None:
        while not self._end.wait(_INTERVAL_S):
            seconds = time.monotonic() - self._started
            if seconds >= _FIRST_S:
                with self._lock:
                    self._stream.write(f"{_ERASE}{self._text} ({seconds:.0f} s)")
                    self._stream.flush()
