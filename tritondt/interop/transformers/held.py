"""HeldAlike: parameters that a module only has, and another module inside of it uses."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tritondt.parallel.local_run import LocalRun
from tritondt.parallel.parameters import distribute_parameter
from tritondt.parallel.style import claim
from tritondt.parallel.weights import WeightStyle
from tritondt.sharding.mesh import Mesh, canonical_mesh
from tritondt.sharding.placement import Placement, Replicate


class HeldAlike(WeightStyle):
    """Style of a module whose parameter `key` is that of another module, `other_key` there, which `style` cuts.

    The bias of BERT's head is one: the module around the decoder has the decoder's, and does not use it. Nothing is
    done about the module's forward; its other parameters are replicated.
    """

    def __init__(self, key: str, other: nn.Module, other_key: str, style: WeightStyle) -> None:
        self.key, self.other, self.other_key, self.style = key, other, other_key, style

    def parameter_placements(self, module: nn.Module, mesh: Mesh) -> dict[str, Placement]:
        """Placement of the shared parameter as the other module has it, and Replicate for the others."""
        found: dict[str, Placement] = {name: Replicate() for name in module._parameters}
        found[self.key] = self.style.parameter_placements(self.other, mesh)[self.other_key]
        return found

    def local_run(self, module: nn.Module, mesh: Mesh) -> LocalRun:
        """None: the module runs as it is."""
        raise AssertionError(f"{type(module).__name__} only holds parameters, and runs as it is")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh | Mesh) -> nn.Module:
        for name, placement in self.parameter_placements(module, canonical_mesh(device_mesh)).items():
            distribute_parameter(module, name, device_mesh, placement, self.src_data_rank)
        claim(module, self, "weights")
        return module
