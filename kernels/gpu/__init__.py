"""Triton kernels, their tables on the device, and what chooses their blocks."""
