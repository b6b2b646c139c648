"""Explains a redistribution over 4,096 ranks, without any process: `python examples/explain.py`."""

import tritondt as T
from tritondt.planning.cost import CostTable
from tritondt.planning.explain import explain_layouts

shape = (8192, 8190)
source = T.Layout((512, 8), T.parse_placements("S0, S1"), shape)
target = T.Layout((512, 8), T.parse_placements("S1, R"), shape)
found = explain_layouts(source, target, 2, CostTable(), (511, 7))  # elements of 2 bytes; the last rank

print(found)
print(f"{found.received_bytes:,} bytes come in, of {target.local_shape((511, 7))} held afterwards")
