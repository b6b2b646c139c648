"""Plans that are found: how a model is laid over a mesh, explained and priced before anything runs."""

from tritondt.found_plan.attention_heads import HeadCut, adapt_heads
from tritondt.found_plan.find import find_plan
from tritondt.found_plan.find_mesh import FoundMesh, find_mesh
from tritondt.found_plan.found_plan import FoundPlan

__all__ = ["FoundMesh", "FoundPlan", "HeadCut", "adapt_heads", "find_mesh", "find_plan"]
