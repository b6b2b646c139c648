"""`demo`: trains a byte-level GPT tensor-parallel on several ranks, and once more on one process.

Both runs have the same weights, data and seed; their losses must agree at every step. The command is in
command.py: the ranks import this package, and are spared what only the command needs.
"""

# Names of --style, the default first, and of --parallel.
STYLE_NAMES = ("dtensor", "local")
PARALLEL = ("tp", "fsdp", "fsdp+tp", "hsdp+tp", "ddp+tp", "ep", "cp")
