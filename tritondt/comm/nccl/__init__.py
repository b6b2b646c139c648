"""NCCL beneath the transport: the library, its start, its streams, and the watch over its operations."""
