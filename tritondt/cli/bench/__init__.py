"""`bench`: timings of this library, interleaved in one run with those of the library it is compared to.

These are the values of its options, which need no torch.
"""

from tritondt.sharding.placement import ReduceOp

DEFAULT_SIZES = "64x96,1023x1025,1024x1024,4096x4096"
DTYPE_NAMES = ("float32", "float64", "float16", "bfloat16", "int64", "int32")
# Names of nccl-tests, which `-o` takes.
REDUCE_OPS: dict[str, ReduceOp] = {"sum": "sum", "prod": "product", "max": "max", "min": "min", "avg": "avg"}
WARM_UP_ROUNDS = 2
# -a of nccl-tests: how the times of the ranks become one time.
AVERAGES = {0: "rank 0", 1: "mean", 2: "least", 3: "most"}
SLOWEST_RANK = 3
