"""Host time over an NCCL that does nothing: `python -m benchmarks.nccl_host_overhead --help`."""
