"""Host time over an NCCL that does nothing: `python -m benchmarks.nccl.host_overhead --help`."""
