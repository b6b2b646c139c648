"""Decides what a redistribution does, as plain values: no torch, no ranks, no processes."""
