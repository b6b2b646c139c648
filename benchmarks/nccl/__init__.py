"""NCCL called by us against torch's ProcessGroupNCCL, on the same library: `python -m benchmarks.nccl --help`."""
