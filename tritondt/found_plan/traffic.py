"""Bytes, messages and seconds of one rank, which add up."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes and messages of one rank, those received from other hosts apart, predicted seconds, and exchanges."""

    sent_bytes: int = 0
    received_bytes: int = 0
    far_bytes: int = 0
    messages: int = 0
    seconds: float = 0.0
    exchanges: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            self.sent_bytes + other.sent_bytes,
            self.received_bytes + other.received_bytes,
            self.far_bytes + other.far_bytes,
            self.messages + other.messages,
            self.seconds + other.seconds,
            self.exchanges + other.exchanges,
        )

    def times(self, number: int) -> "Traffic":
        """Traffic of so many alike."""
        return Traffic(
            number * self.sent_bytes,
            number * self.received_bytes,
            number * self.far_bytes,
            number * self.messages,
            number * self.seconds,
            number * self.exchanges,
        )
