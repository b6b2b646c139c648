"""Parameters that are gathered, freed and reduced together: all that one call of `fully_shard` takes."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

from tritondt.fsdp.flat import FlatParameters
from tritondt.fsdp.meshes import DataMesh
from tritondt.fsdp.parameter import ShardedParameter
from tritondt.fsdp.reduction import GradientReduction, Policy, Reduced, finish


def _outside_modes(call: Callable[..., None]) -> Callable[..., None]:
    """The call, hidden from modes of dispatch and from transforms of torch.func.

    Selective checkpoints count calls, and a recomputation gathers less than forward; transforms wrap what is made.
    """

    @wraps(call)
    def outside(*args: Any, **kwargs: Any) -> None:
        transform: Any = torch._C._functorch.peek_interpreter_stack()
        if transform is None and not torch._C._len_torch_dispatch_stack():
            call(*args, **kwargs)
            return
        with temporarily_clear_interpreter_stack(), _disable_current_modes():
            call(*args, **kwargs)

    return outside


class ParameterGroup:
    """Parameters of one call of `fully_shard`, in one flat tensor for each dtype."""

    def __init__(self, parameters: Sequence[ShardedParameter], data: DataMesh, param_dtype: torch.dtype | None) -> None:
        self.parameters = list(parameters)
        self._data, self._param_dtype = data, param_dtype
        # Reductions of the pass that runs, and of earlier ones whose results nobody has asked for.
        self._under_way: list[tuple[Reduced, int]] = []
        self._postponed: list[tuple[Reduced, int]] = []
        self._lay_out()

    def _lay_out(self) -> None:
        """Puts the parameters in flat tensors of those of one dtype and device."""
        alike: dict[tuple[torch.dtype, torch.device], list[ShardedParameter]] = {}
        for parameter in self.parameters:
            alike.setdefault((parameter.spec.dtype, parameter.shard.device), []).append(parameter)
        self.flats = [
            FlatParameters(found, self._data, self._param_dtype if dtype.is_floating_point else None)
            for (dtype, _), found in alike.items()
        ]
        self._reductions = [GradientReduction(flat) for flat in self.flats]
        self._is_on_meta = any(flat.device.type == "meta" for flat in self.flats)

    def convert(self) -> None:
        """Lays the group out anew where its parameters have another device or dtype now, as after to_empty."""
        if sum(parameter.convert() for parameter in self.parameters):
            self.free()
            self._lay_out()

    @property
    def num_ranks(self) -> int:
        """Number of ranks whose gradients are added up."""
        return len(self._data.mesh.ranks)

    @property
    def has_replicas(self) -> bool:
        """Whether several ranks have the same shards."""
        return self.num_ranks > self._data.mesh.shape[self._data.shard_axis]

    @property
    def is_whole(self) -> bool:
        """Whether the whole parameters are here."""
        return all(flat.is_whole for flat in self.flats)

    @_outside_modes
    def issue_gather(self) -> None:
        """Issues the gather of the parameters, unless they are here or under way: a collective call."""
        if self._is_on_meta:  # and given parameters since, as by load_state_dict(assign=True)
            self.convert()
        for flat in self.flats:
            flat.gather()

    @_outside_modes
    def wait(self) -> None:
        """Returns when the whole parameters are here."""
        for flat in self.flats:
            flat.wait()

    @_outside_modes
    def free(self, num_keepers: int = 0) -> None:
        """Frees the whole parameters, which each `num_keepers` ranks keep cut among themselves."""
        for flat in self.flats:
            flat.drop(num_keepers)

    def register(self, *, whole: bool) -> None:
        """Makes the parameters of forward, or else the sharded ones, those of the modules."""
        for parameter in self.parameters:
            parameter.register(parameter.whole if whole else parameter.sharded)

    def has_gradients(self) -> bool:
        """Whether a parameter has a gradient that was neither reduced nor kept."""
        return any(parameter.whole.grad is not None for parameter in self.parameters)

    @_outside_modes
    def keep_gradients(self, policy: Policy) -> None:
        """Keeps the gradients of this pass for a later reduction."""
        for reduction in self._reductions:
            reduction.keep(policy)

    @_outside_modes
    def issue_reduction(self, policy: Policy) -> None:
        """Issues the reduction of the gradients: a collective call."""
        for flat, reduction in zip(self.flats, self._reductions, strict=True):
            found = reduction.start(policy)
            if found is not None:
                self._under_way.append((found, flat.rank))

    def postpone_reductions(self) -> None:
        """Leaves the results of the reductions to the next `finish_reductions`."""
        self._postponed += self._under_way
        self._under_way = []

    @_outside_modes
    def finish_reductions(self) -> None:
        """Waits for all reductions; their results are added to the gradients of the sharded parameters."""
        under_way, self._under_way, self._postponed = [*self._postponed, *self._under_way], [], []
        for reduced, rank in under_way:
            finish(reduced, rank)

    def drop_gradients(self) -> None:
        """Drops gradients that were not reduced, and those under way."""
        self._under_way = []
        for parameter in self.parameters:
            parameter.whole.grad = None
