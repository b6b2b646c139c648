"""Fingerprints that tell one exchange from another, for ranks that must agree and messages that may cross."""

import hashlib


def exchange_fingerprint(text: str) -> int:
    """56-bit hash of the text that describes an exchange, equal on all ranks and in all processes.

    >>> hex(exchange_fingerprint("S0 -> R"))
    '0x7eb19109cce139'
    """
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
