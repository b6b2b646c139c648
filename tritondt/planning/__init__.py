"""Plans of redistributions as plain values: no torch, no ranks, no processes."""
