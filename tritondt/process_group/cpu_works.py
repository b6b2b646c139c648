"""Works of operations on tensors of the CPU: one that has run, and one in a queue."""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from tritondt.comm.work import Work as QueuedWork
from tritondt.comm.work import again
from tritondt.errors import PeerError
from tritondt.process_group.futures import fail, is_list_of_cpp_asked_for, list_of_cpp, succeed

_NO_TIMEOUT = timedelta(0)  # as torch says it


class WorkOfTensors(Work):
    """A collective of all ranks, and the tensors that it writes."""

    def __init__(self, results: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._results = results

    def result(self) -> list[torch.Tensor]:
        """The tensors that are written."""
        return list(self._results)

    def _source_rank(self) -> int:
        return -1

    def source_rank(self) -> int:
        """-1: no message of one rank."""
        return -1

    def synchronize(self) -> None:
        """Waits."""
        self.wait()

    def block_current_stream(self) -> None:
        """Waits."""
        self.wait()

    def get_future(self) -> Any:
        """A torch.futures.Future of the list of tensors that are written; see `is_list_of_cpp_asked_for`."""
        if is_list_of_cpp_asked_for(self._results):
            self.wait()
            return list_of_cpp(self._results)
        return self._made_future()

    def _made_future(self) -> Any:
        """The future of Python's readers, which wait for it themselves."""
        raise NotImplementedError


class FinishedWork(WorkOfTensors):
    """A collective that has run, and its results."""

    def is_completed(self) -> bool:
        """True."""
        return True

    def is_success(self) -> bool:
        """True: one that fails raises its error where it is asked for."""
        return True

    def exception(self) -> None:
        """None."""

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """True, at once."""
        return True

    def _made_future(self) -> Any:
        future = torch.futures.Future[Any]()
        succeed(future, self._results)
        return future


class QueuedCollective(WorkOfTensors):
    """A collective, its results when it has run, and its error where it failed."""

    def __init__(self, text: str, results: Sequence[torch.Tensor]) -> None:
        super().__init__(list(results))
        self.text = text
        self._error: BaseException | None = None
        self.issued: QueuedWork | None = None  # what runs it, once it is issued
        self._has_run, self._future_lock = threading.Event(), threading.Lock()
        self._future: Any = None
        self._unsettled: Any = None  # the future, until it has its results

    def run(self, move: Callable[[], None]) -> None:
        """Runs the collective by `move`, whose error is the Work's."""
        try:
            with torch.no_grad():
                move()
        except BaseException as error:  # whoever waits for it raises it
            self._error = error
            if not isinstance(error, Exception):  # Ctrl-C in a thread of the program, which is to end by it
                raise
        finally:
            self._has_run.set()
            self._settle()

    def _settle(self) -> None:
        """Gives the future what there is, once, and with no lock: its callbacks may ask for more."""
        with self._future_lock:
            future, self._unsettled = self._unsettled, None
        if future is None:
            return
        if self._error is None:
            succeed(future, self._results)
        elif isinstance(self._error, Exception):
            fail(future, self._results, self._error)
        else:
            fail(future, self._results, PeerError(f"{self.text} was ended by {type(self._error).__name__}"))

    def is_completed(self) -> bool:
        """Whether the collective has run, well or not."""
        return self._has_run.is_set()

    def is_success(self) -> bool:
        """Whether the collective has run well."""
        return self._has_run.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        """The collective's error; None where it has none, or is under way."""
        return self._error

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Returns when the collective has run; raises its error, and PeerError where that is not within `timeout`."""
        limit_s = timeout.total_seconds() if timeout > _NO_TIMEOUT else None
        if limit_s is None and self.issued is not None and not self._has_run.is_set():
            self.issued.run()  # here, where its thread has not come to it yet: most are waited for at once
        if not self._has_run.wait(limit_s):
            raise PeerError(f"{self.text} was waited for {limit_s:g} s, as asked, and is still under way")
        if self._error is not None:
            raise again(self._error) from self._error
        return True

    def _made_future(self) -> Any:
        with self._future_lock:
            if self._future is None:
                self._future = self._unsettled = torch.futures.Future[Any]()
            future = self._future
        if self._has_run.is_set():
            self._settle()
        return future
