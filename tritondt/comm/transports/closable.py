"""Communicators that end for good, by failing or on purpose, and refuse all use from then on with the reason."""

from tritondt.errors import ForkedError, WorldError


class _EndedError(WorldError):
    """The communicator was ended on purpose."""


class Closable:
    """A communicator that can exchange nothing any more once it has a `failure`, the first reason why."""

    failure: BaseException | None = None

    def _end(self, how: str) -> BaseException:
        """Refuses further use, and gives the reason; `how` is "closed" or "aborted"."""
        self.failure = self.failure or _EndedError(f"the communicator was {how}")
        return self.failure

    @property
    def _is_inherited(self) -> bool:
        """Whether the connections belong to the process that this one was forked from."""
        return isinstance(self.failure, ForkedError)

    def _check_own(self) -> None:
        if self._is_inherited:
            self._check_usable("the end of a communicator")

    def _check_usable(self, description: str) -> None:
        if self.failure is None:
            return
        if self._is_inherited:
            raise ForkedError(f"{description} was asked for, but {self.failure}")
        found = "ended" if isinstance(self.failure, _EndedError) else "failed before"
        raise WorldError(
            f"{description} was asked of a communicator that {found} ({self.failure}); make a new world: call "
            "tritondt.abort() on every rank, or initialise torch.distributed again"
        ) from self.failure
