"""Steps that the ranks of a mesh take together: what one raises, all raise."""

from collections.abc import Callable
from typing import TypeVar

from tritondt.errors import CheckpointError
from tritondt.redistribution.agreement import texts_on_all
from tritondt.sharding.mesh import Mesh

Result = TypeVar("Result")


def together(mesh: Mesh, act: Callable[[], Result], doing: str) -> Result:
    """The result of `act` on this rank; CheckpointError on all ranks of the mesh where it raised on one.

    A collective call. `doing` follows "while" in the error.
    """
    error: Exception | None = None
    own = ""
    try:
        result = act()
    except Exception as raised:  # noqa: BLE001  raised on all ranks
        error, own = raised, _told(raised) or type(raised).__name__
    texts = texts_on_all(mesh, own)
    if not any(texts):
        return result
    if len(set(texts)) == 1:
        raise CheckpointError(texts[0]) from error
    rank, text = next((rank, text) for rank, text in zip(mesh.ranks, texts, strict=True) if text)
    raise CheckpointError(f"rank {rank} failed while {doing}: {text}") from error


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
