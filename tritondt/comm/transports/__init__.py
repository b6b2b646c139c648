"""Transports: sockets, Gloo, NCCL, and ranks that are threads."""
