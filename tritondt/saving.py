"""The name under which files saved before 2026-11-22 look for the function that rebuilds a distributed tensor."""

from tritondt.dtensor.serialization import rebuild_dtensor as loaded

__all__ = ["loaded"]
