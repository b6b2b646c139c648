"""Parameters of one dtype in flat memory: shards that stay, and whole parameters that are there while they are needed.

A gather is one exchange for all of them, from memory and into memory; one table of copies then puts every shard in its
place. The whole parameters are tensors on one storage, which is emptied in between: what autograd has saved of them
for backward is there again when they are.
"""

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any

import torch

from tritondt.comm.work import Work
from tritondt.dtensor.pending import forget_prefetched
from tritondt.dtensor.writes import Watch, memory_of
from tritondt.errors import FullyShardError
from tritondt.fsdp.flat_layout import FlatLayout
from tritondt.fsdp.meshes import DataMesh
from tritondt.fsdp.parameter import ShardedParameter
from tritondt.kernels.memory import allocate, reallocate
from tritondt.kernels.tables import Table, copy_table
from tritondt.redistribution.refusals import refuse_redistribution
from tritondt.redistribution.run import check_memory, redistribute_local_async
from tritondt.sharding.placement import Partial, Placement, ReduceOp, Replicate, Shard
from tritondt.sharding.spec import DTensorSpec, TensorMeta
from tritondt.sharding.strides import dense_strides

# Elements at whose multiples whole parameters begin: 64 bytes of float32.
_ALIGNMENT = 16


class Specs:
    """Specs of a flat tensor on the data mesh: in shards, whole, and as terms of a mean or of a sum."""

    def __init__(self, data: DataMesh, flat: FlatLayout, dtype: torch.dtype) -> None:
        meta, num_axes = TensorMeta.contiguous((flat.numel,), dtype), data.mesh.ndim
        cut: list[Placement] = [Replicate()] * num_axes
        cut[data.shard_axis] = Shard(0, sizes=flat.lengths)
        self.shards = DTensorSpec(data.mesh, cut, meta)
        self.whole = self.shards.with_placements([Replicate()] * num_axes)

    def terms(self, op: ReduceOp) -> DTensorSpec:
        """Spec of a tensor of which every rank has a term."""
        return self.shards.with_placements([Partial(op)] * len(self.shards.placements))


class Parts:
    """Whole parameters cut among the ranks of a data mesh's last axis: the gather of what each has, and copies.

    `offsets` are where the parameters begin in the flat tensor of whole ones, of `dtype`.
    """

    def __init__(
        self, parameters: Sequence[ShardedParameter], data: DataMesh, offsets: list[int], dtype: torch.dtype
    ) -> None:
        coordinate = data.mesh.coordinate
        assert coordinate is not None, f"{data.mesh} is that of the calling rank"
        self.rank, self.num_ranks = coordinate[data.shard_axis], data.mesh.shape[data.shard_axis]
        members = [parameter.member._replace(cuts=data.cuts) for parameter in parameters]
        self.layout = FlatLayout(members, self.num_ranks)
        self._specs = Specs(data, self.layout, dtype)
        self._offsets, self._itemsize = offsets, dtype.itemsize
        self._joins: Table | None = None
        self._cuts: Table | None = None

    def issue_gather(self, own: torch.Tensor) -> tuple[torch.Tensor, Work | None]:
        """Issues the gather of what the ranks have: a collective call."""
        if not self.layout.numel:
            return own, None
        return redistribute_local_async(own, self._specs.shards, self._specs.whole)

    def refuse_gather(self, error: Exception) -> None:
        """Tells the others why this rank takes no part in the gather."""
        if self.layout.numel:
            refuse_redistribution(self._specs.shards, self._specs.whole, error)

    def join(self, gathered: torch.Tensor, whole: torch.Tensor) -> None:
        """Copies what was gathered to the whole parameters."""
        if self._joins is None:
            self._joins = copy_table(self.layout.gathers(self._offsets, self._itemsize), whole.device)
        self._joins.run([gathered.data_ptr()], [whole.data_ptr()], torch.get_num_threads())

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of the whole parameters."""
        own = allocate((self.layout.lengths[self.rank],), whole.dtype, whole.device)
        if self._cuts is None:
            self._cuts = copy_table(self.layout.cuts(self.rank, self._offsets, self._itemsize), whole.device)
        self._cuts.run([whole.data_ptr()], [own.data_ptr()], torch.get_num_threads())
        return own


class FlatParameters:
    """Parameters of one dtype that are gathered together; in forward they have `dtype_computed`.

    Between forward and backward they may be kept in parts on fewer ranks than hold the shards, and gathered from them.
    """

    def __init__(
        self, parameters: Sequence[ShardedParameter], data: DataMesh, dtype_computed: torch.dtype | None
    ) -> None:
        self.parameters, self.data = list(parameters), data
        self.dtype = parameters[0].spec.dtype
        self.dtype_computed = self.dtype if dtype_computed is None else dtype_computed
        lengths = (aligned_length(parameter.member.shape) for parameter in self.parameters)
        self._offsets = list(accumulate(lengths, initial=0))
        self._shards = self._parts_on(data)
        self.rank, self.num_ranks, self.layout = self._shards.rank, self._shards.num_ranks, self._shards.layout
        # By the number of ranks among which parts are kept, and this rank's one while it is.
        self._fewer: dict[int, Parts] = {}
        self._kept: tuple[Parts, torch.Tensor] | None = None
        self.device = parameters[0].shard.device
        self.shard = self._place_shards()
        self._whole = self._place_whole()
        self._gathered: tuple[Parts, torch.Tensor, Work | None] | None = None
        self._refused: Exception | None = None  # why this rank takes no part in the gather that was asked for
        self.is_whole = False
        # Writes to the shards since they were last gathered; watched while what was gathered is kept.
        self._watch: Watch | None = None
        self._seen: tuple[int, ...] = ()
        # How often other values were gathered, how often others took the shards' place, and the writes to these then.
        self._num_contents, self._num_adoptions = 0, 0
        self._content = self._versions()

    def _parts_on(self, data: DataMesh) -> Parts:
        return Parts(self.parameters, data, self._offsets, self.dtype_computed)

    def _place_shards(self) -> torch.Tensor:
        """Flat tensor of this rank's shards, on which the sharded parameters lie."""
        flat = allocate((self.layout.lengths[self.rank],), self.dtype, self.device)
        for parameter, place in zip(self.parameters, self.layout.of_rank(self.rank), strict=True):
            parameter.place_shard(flat[place.offset : place.offset + prod(place.shape)].view(place.shape))
        return flat

    def _place_whole(self) -> torch.Tensor:
        """Flat tensor without memory on which the parameters of forward lie."""
        flat = torch.empty(self._offsets[-1], dtype=self.dtype_computed, device=self.device)
        for parameter, offset in zip(self.parameters, self._offsets, strict=False):
            shape = parameter.member.shape
            parameter.place_whole(flat.as_strided(shape, dense_strides(shape), offset))
        if not flat.is_meta:
            reallocate(flat, 0)
        return flat

    @property
    def is_under_way(self) -> bool:
        """Whether a gather was issued that nobody has waited for."""
        return self._gathered is not None or self._refused is not None

    def gather(self) -> None:
        """Issues the gather of what the shards hold now, unless that is under way or here: a collective call."""
        try:
            self._check_device()
            check_memory(self.shard, "a gather of fully_shard")
            self._adopt()
        except Exception as error:
            if self.is_whole or self.is_under_way:
                raise
            # Raised where the others raise that they have heard of it: what comes before that, all ranks exchange.
            self._refused = error
            (self._shards if self._kept is None else self._kept[0]).refuse_gather(error)
            return
        if (self.is_whole or self.is_under_way or self._kept is not None) and self._seen != self._counts():
            self.drop()
        if self.is_whole or self.is_under_way:
            return
        if self._kept is not None:
            parts, own = self._kept
            self._gathered = parts, *parts.issue_gather(own)
            return
        self._watch = Watch(tuple(local for found in self.parameters for local in memory_of(found.sharded)))
        self._seen = self._counts()
        if self._content != self._versions():
            self._num_contents, self._content = self._num_contents + 1, self._versions()
        source = self.shard
        if self.dtype is not self.dtype_computed:
            source = source.to(self.dtype_computed)
        self._gathered = self._shards, *self._shards.issue_gather(source)

    def _check_device(self) -> None:
        if self.device.type != self.data.mesh.device_type:
            raise FullyShardError(
                f"{self.parameters[0].name} is on {self.device}, and the mesh on {self.data.mesh.device_type}; before "
                f"forward move the module there by model.to(device), or from meta by model.to_empty(device=...) with "
                "values set after it, or load_state_dict(distributed tensors, assign=True)"
            )

    def wait(self) -> None:
        """Puts what was gathered in its place; PeerError and MismatchError where the gather failed."""
        if self._refused is not None:
            refused, self._refused = self._refused, None
            raise refused
        if self._gathered is None:
            return
        (parts, gathered, work), self._gathered = self._gathered, None
        if work is not None:
            work.wait()
        self._kept = None
        reallocate(self._whole, self._whole.numel() * self._whole.element_size())
        parts.join(gathered, self._whole)
        self.is_whole = True
        self._stamp(2 * self._num_contents)
        for parameter in self.parameters:
            needed = parameter.sharded.requires_grad
            if parameter.whole.requires_grad is not needed:
                parameter.whole.requires_grad_(needed)

    def drop(self, num_keepers: int = 0) -> None:
        """Frees the whole parameters, and what is being gathered of them.

        Each `num_keepers` ranks keep them cut among themselves, until the next gather, which asks no others.
        """
        self._refused = None
        if self._gathered is not None:
            (_, _, work), self._gathered = self._gathered, None
            if work is not None:
                work.wait()
        if not num_keepers:
            self._kept = self._watch = None
        if self.is_whole:
            if num_keepers:
                self._keep(num_keepers)
            reallocate(self._whole, 0)
            self.is_whole = False
            self._stamp(2 * self._num_contents + 1)
            for parameter in self.parameters:
                forget_prefetched(parameter.whole)

    def _keep(self, num_keepers: int) -> None:
        parts = self._fewer.get(num_keepers)
        if parts is None:
            parts = self._fewer[num_keepers] = self._parts_on(self.data.in_groups_of(num_keepers))
        self._kept = parts, parts.cut(self._whole)

    def _counts(self) -> tuple[int, ...]:
        """Counts of the writes to the shards, by operators as all ranks know them and to their memory."""
        assert self._watch is not None, "writes are counted while they are watched"
        return (*self._watch.count(self.parameters[0].sharded), *self._versions())

    def _versions(self) -> tuple[int, int, int]:
        """Counts of the shards' replacements, and of the writes to them that autograd knows of."""
        shards: list[Any] = [parameter.sharded for parameter in self.parameters]
        versions = sum(shard._version for shard in shards), sum(shard._local_tensor._version for shard in shards)
        return self._num_adoptions, *versions

    def _stamp(self, version: int) -> None:
        """Gives the whole parameters a version: autograd raises where it reads what is freed, or of other values.

        Kernels that it would call read the memory that is not there, and end the process.
        """
        tensors = [found for parameter in self.parameters for found in parameter.versioned]
        torch._C._autograd._unsafe_set_version_counter(tuple(tensors), (version,) * len(tensors))

    def _adopt(self) -> None:
        """Takes over what sharded parameters were given in place of their memory, as by load_state_dict(assign=True),
        or for one call by torch.func.functional_call.

        FullyShardError where that is laid out otherwise.
        """
        for parameter, place in zip(self.parameters, self.layout.of_rank(self.rank), strict=True):
            user = parameter.users[0]
            found: Any = user.module._parameters[user.key]
            if found is not parameter.whole:
                if getattr(found, "_spec", None) is not parameter.spec:
                    kind = "None" if found is None else getattr(found, "_spec", f"one of shape {tuple(found.shape)}")
                    raise FullyShardError(
                        f"{parameter.name} was sharded as {parameter.spec} and is {kind} now; allowed are parameters "
                        "of this layout and dtype: load a state dict of distributed tensors, convert the module that "
                        "fully_shard was given, and torch.func.functional_call takes distributed tensors, too"
                    )
                if found is not parameter.sharded:
                    self._num_adoptions += 1
                    parameter.replace(found)
            local = parameter.shard
            held = self.shard[place.offset : place.offset + prod(place.shape)].view(place.shape)
            if local.data_ptr() != held.data_ptr() and local.numel():
                if local.device != self.device:
                    raise FullyShardError(
                        f"{parameter.name} is on {local.device}, and the parameters that were sharded with it on "
                        f"{self.device}; move the module there by model.to({self.device.type!r})"
                    )
                parameter.place_shard(held)


def aligned_length(shape: Sequence[int]) -> int:
    """Elements from the start of a whole parameter to that of the next."""
    return -(-prod(shape) // _ALIGNMENT) * _ALIGNMENT
