"""The secret that a job's ranks share, and proofs that the process at the other end of a connection knows it.

A proof is an HMAC-SHA256 over numbers that both ends have just drawn, who plays which part, and the address that was
called. It is of use for no other connection, and in no other direction. A process that passes it on from an address of
its own is found out. Messages on the connection are neither signed nor encrypted.
"""

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field
from typing import Literal

NONCE_BYTES, PROOF_BYTES, SIGNATURE_BYTES = 32, 32, 32

Role = Literal["caller", "called"]


@dataclass(frozen=True)
class Connecting:
    """A new connection of which both ends prove themselves: the places of both, the address that is called, nonces.

    `token` is what the called rank has told of itself in the store, drawn for this communicator.
    """

    caller: int
    called: int
    token: str
    address: tuple[str, int]
    caller_nonce: bytes
    called_nonce: bytes


@dataclass(frozen=True)
class Secret:
    """A secret of at least 16 bytes, which no text of this object shows.

    >>> Secret(b"sixteen bytes or more")
    Secret()
    """

    content: bytes = field(repr=False)

    def mark(self, key: str) -> str:
        """The text by which ranks find out, in the store, whether their secrets are equal, for the key of one use.

        >>> Secret(b"a" * 16).mark("ranks 0,1/1") == Secret(b"b" * 16).mark("ranks 0,1/1")
        False
        """
        return self._digest("mark", key).hex()

    def proof(self, role: Role, connecting: Connecting) -> bytes:
        """The proof that the rank of such a role shows the other one.

        >>> connecting = Connecting(1, 0, "00", ("127.0.0.1", 4000), draw(), draw())
        >>> secret = Secret(b"sixteen bytes or more")
        >>> secret.is_proof(secret.proof("caller", connecting), "caller", connecting)
        True
        >>> secret.is_proof(secret.proof("caller", connecting), "called", connecting)
        False
        """
        host, port = connecting.address
        numbers = (connecting.caller, connecting.called, port)
        nonces = (connecting.caller_nonce.hex(), connecting.called_nonce.hex())
        return self._digest("proof", role, *map(str, numbers), host, connecting.token, *nonces)

    def is_proof(self, shown: bytes, role: Role, connecting: Connecting) -> bool:
        """Whether that is the proof of such a role."""
        return hmac.compare_digest(shown, self.proof(role, connecting))

    def signature(self, place: int, content: bytes) -> bytes:
        """The proof that `content` is of the rank at `place` of a group whose ranks share the secret.

        >>> len(Secret(b"sixteen bytes or more").signature(0, b"content")) == SIGNATURE_BYTES
        True
        """
        return self._digest("content", str(place), hashlib.sha256(content).hexdigest())

    def _digest(self, *words: str) -> bytes:
        """HMAC over words, each with its length, so that no two lists of words are alike."""
        text = b"".join(len(word.encode()).to_bytes(4, "little") + word.encode() for word in ("tritondt", *words))
        return hmac.digest(self.content, text, "sha256")


def draw() -> bytes:
    """A number that nobody can guess, for one connection."""
    return secrets.token_bytes(NONCE_BYTES)
