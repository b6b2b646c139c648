"""Errors that the library raises on purpose; each says what was asked, what was found and what is allowed."""


class TritondtError(RuntimeError):
    """Base of all errors of tritondt; a RuntimeError, like many of torch's own."""


class ArgumentError(TritondtError, TypeError, ValueError):
    """An argument of a wrong type or value; names the given value and the allowed ones."""


class LayoutError(TritondtError, ValueError):
    """A placement, a layout or a spec that cannot exist."""


class OpenLengthError(TritondtError, ValueError):
    """A question about a length that a graph of torch.compile leaves open; asked again, with a guard, of its value."""


class MeshError(TritondtError, ValueError):
    """A mesh that does not fit the world, or two meshes that do not fit each other."""


class ReductionError(TritondtError, ValueError):
    """A reduction that its element type, or its gradient, does not have."""


class LocalTensorError(TritondtError, ValueError):
    """A local tensor that does not match this rank's part under its spec."""


class CheckpointError(TritondtError):
    """A checkpoint that cannot be saved, or that is refused before any of it is loaded."""


class TransportError(TritondtError, TypeError):
    """A dtype or a device that the transport cannot carry."""


class WorldError(TritondtError):
    """Communication without a world, or in a world that was closed or has failed."""


class ForkedError(WorldError):
    """Communication asked for in a process that was forked from a rank."""


class PeerError(TritondtError):
    """A rank that failed, left, or did not answer another in time; names the rank, the step and the wait."""


class RefusalError(PeerError):
    """An exchange that another rank refused, alone: all ranks count it as run, and the world goes on."""


def mark_told(error: BaseException) -> None:
    """Notes that the other ranks of the call have been told of an error of this rank."""
    error.__dict__[_TOLD] = True


def was_told(error: BaseException) -> bool:
    """Whether the other ranks of the call have been told of an error, or of what it explains, or know of it.

    >>> error = ValueError("no layer")
    >>> was_told(error), mark_told(error), was_told(error), was_told(PeerError("rank 1 failed"))
    (False, None, True, True)
    """
    found: BaseException | None = error
    if type(found).__name__ == _END_OF_RECOMPUTATION:
        return True
    while found is not None and not isinstance(found, PeerError) and _TOLD not in found.__dict__:
        found = found.__cause__
    return found is not None


# By which torch's checkpoints end a recomputation once nothing more is read of it: every rank ends its own there.
_END_OF_RECOMPUTATION = "_StopRecomputationError"
# On an error of which other ranks were told.
_TOLD = "_tritondt_told"


class MismatchError(PeerError):
    """Different calls of ranks at one point; names both ranks and both values."""


class PropagationError(TritondtError):
    """An operator that cannot run on distributed tensors with these layouts; names a way to make it run."""


class MixedTensorsError(PropagationError):
    """Plain and distributed tensors in one operator; no TypeError, which Python's operators would swallow."""


def check_not_of_torch(x: object, taker: str) -> None:
    """Raises MixedTensorsError for a DTensor of torch.distributed.tensor, or a LocalTensor: their operators take over.

    Known by the name of its class, so that nothing of torch is imported to ask.
    """
    kind = type(x)
    if kind.__name__ == "DTensor" and kind.__module__.startswith("torch.distributed."):
        raise MixedTensorsError(
            f"{taker} got a DTensor of torch.distributed.tensor; give it tritondt.from_torch(x), which shares its "
            "memory, or x.to_local() where a plain tensor is meant"
        )
    if kind.__name__ == "LocalTensor" and kind.__module__.startswith("torch.distributed."):
        raise MixedTensorsError(
            f"{taker} got a LocalTensor, which has the values of all ranks under torch's LocalTensorMode; allowed are "
            "tensors of one rank: tritondt.comm.transports.threads.run_ranks(n, body) runs n ranks in one process"
        )


class ImplicitRedistributionError(PropagationError):
    """An implicit redistribution within `explicit_redistribution()`."""


class ImplicitRedistributionWarning(UserWarning):
    """An implicit redistribution within `explicit_redistribution(mode="warn")`."""


class DifferenceError(TritondtError, AssertionError):
    """An operator that gives other values on distributed tensors than on one device."""


class ParallelizeError(TritondtError, ValueError):
    """A plan that does not fit its module or mesh; names the module, what was found and what is allowed."""


class FullyShardError(TritondtError, ValueError):
    """A module, or an option, that `fully_shard` cannot take; says what was found and what to write instead."""
