"""Tools of others on distributed tensors: checkpoints, state dicts, models of transformers."""
