"""Torch's own tools on distributed tensors: checkpoints and state dicts."""
