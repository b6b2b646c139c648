"""fully_shard on rank threads: the losses, weights and state dicts of one process, whatever the layout."""

from math import prod
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import tritondt as T
from tests.fsdp.models import DataAxes, Net, batch, layout, loss_of, plan, sharded, train
from tritondt.comm.transports.threads import run_ranks
from tritondt.debug import CommDebugMode
from tritondt.fsdp import FSDPModule, fully_shard
from tritondt.parallel import parallelize_module


def whole_state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def gradients_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("kind", ["fsdp", "hsdp", "fsdp+tp", "hsdp+tp", "hsdp+tp of 2"])
@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}], ids=["foreach", "fused"])
def test_trains_as_one_process_does(kind: str, options: dict[str, Any]) -> None:
    single = Net()
    expected = train(single, **options)

    def body(rank: int) -> Any:
        model, num_parts, part = sharded(kind, rank)
        return train(model, num_parts, part, **options), whole_state(model), num_parts

    num_ranks = 8 if kind.endswith("of 2") else 4
    found = run_ranks(num_ranks, body)
    means = [sum(losses) / num_ranks for losses in zip(*[each[0] for each in found], strict=True)]
    torch.testing.assert_close(means, expected, rtol=0, atol=1e-5)
    for _, state, _ in found:
        for name, value in single.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "dims", "has_tensor_axis"),
    [
        ((2, 2), DataAxes(("a", "b")), False),
        ((2, 2), DataAxes(("b", "a")), False),
        ((2, 2, 2), DataAxes(("a", "b"), "c"), False),
        ((2, 2, 2), DataAxes(("a", "b")), True),
        ((1, 2, 2), DataAxes("a", ("b", "c")), False),
        ((2, 1, 2), DataAxes("b", "a"), True),
    ],
)
def test_several_axes_shard_and_replicate(shape: tuple[int, ...], dims: DataAxes, has_tensor_axis: bool) -> None:
    single = Net()
    loss_of(single, 0).backward()
    num_ranks, width = prod(shape), shape[-1] if has_tensor_axis else 1

    def body(rank: int) -> Any:
        model: Any = Net()
        whole = T.Mesh(shape, ("a", "b", "c")[: len(shape)])
        if has_tensor_axis:
            first = rank // width * width
            tensor_mesh = T.Mesh((width,), ("c",), ranks=range(first, first + width))
            parallelize_module(model, tensor_mesh, plan(), src_data_rank=None)
        for block in model.blocks:
            fully_shard(block, mesh=whole, dp_mesh_dims=dims)
        fully_shard(model, mesh=whole, dp_mesh_dims=dims)
        loss_of(model, 0, num_ranks // width, rank // width).backward()
        weight = model.blocks[0].up.weight
        return gradients_of(model), weight.to_local().numel(), weight.placements

    shard = (dims.shard,) if isinstance(dims.shard, str) else dims.shard
    cut = {*shard, *(("c",) if has_tensor_axis else ())}
    wanted = tuple(T.Shard(0) if name in cut else T.Replicate() for name in ("a", "b", "c")[: len(shape)])
    num_copies = prod(size for size, name in zip(shape, "abc", strict=False) if name not in cut)
    found = run_ranks(num_ranks, body)
    assert sum(num_elements for _, num_elements, _ in found) == 54 * num_copies
    for gradients, _, placements in found:
        assert placements == wanted
        for name, parameter in single.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.extended
def test_parameters_are_distributed_over_both_axes() -> None:
    def body(rank: int) -> Any:
        model, _, _ = sharded("fsdp+tp", rank)
        weight = model.get_parameter("blocks.0.up.weight")
        norm = model.get_parameter("norm.weight")
        assert isinstance(weight, T.DTensor)
        assert isinstance(norm, T.DTensor)
        return weight.placements, weight.device_mesh.shape, tuple(weight.to_local().shape), norm.placements

    found = run_ranks(4, body)
    assert found[0][:2] == ((T.Shard(0), T.Shard(0)), (2, 2))
    # 9 rows: 5 and 4 over the tensor axis, each of which the data axis cuts.
    assert [each[2] for each in found] == [(3, 6), (2, 6), (2, 6), (2, 6)]
    assert found[0][3] == (T.Shard(0), T.Replicate())


def test_a_block_is_one_exchange_each_way() -> None:
    def body(rank: int) -> Any:
        model, num_parts, part = sharded("fsdp", rank)
        loss_of(model, 0, num_parts, part).backward()
        with CommDebugMode() as traffic:
            loss_of(model, 0, num_parts, part).backward()
        return traffic.get_total_counts()

    # Four gathers, three again in backward, and four reductions.
    assert run_ranks(4, body) == [11] * 4


@pytest.mark.extended
def test_gradients_are_kept_until_they_are_wanted() -> None:
    single = Net()
    for step in range(2):
        loss_of(single, step).backward()

    def body(rank: int) -> Any:
        model, num_parts, part = sharded("fsdp", rank)
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(False)
        loss_of(model, 0, num_parts, part).backward()
        missing = all(parameter.grad is None for parameter in model.parameters())
        model.set_requires_gradient_sync(True)
        loss_of(model, 1, num_parts, part).backward()
        return missing, gradients_of(model)

    for missing, gradients in run_ranks(4, body):
        assert missing
        for name, parameter in single.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)


def test_gradients_that_were_kept_come_with_a_backward_that_does_not_use_their_module() -> None:
    def steps(model: Any, first: torch.Tensor, second: torch.Tensor) -> list[Any]:
        model(first).square().mean().backward()
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(True)
        model[0](second).square().mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    def made() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))

    batches = torch.arange(24.0).view(2, 4, 3) / 24
    expected = steps(made(), *batches)

    def body(rank: int) -> list[torch.Tensor]:
        model: Any = made()
        for layer in model:
            fully_shard(layer, mesh=T.Mesh((2,)))
        fully_shard(model, mesh=T.Mesh((2,))).set_requires_gradient_sync(False)
        return [found.full_tensor() for found in steps(model, *[batch.chunk(2)[rank] for batch in batches])]

    for found in run_ranks(2, body):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


class Chosen(nn.Module):
    """Two layers of which a rank may use one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(3, 3, bias=False) for _ in range(3)])

    def forward(self, x: torch.Tensor, choice: int) -> torch.Tensor:
        found: torch.Tensor = self.layers[choice](x)
        return found


def test_a_parameter_that_some_ranks_use_has_the_mean_and_an_unused_one_none() -> None:
    def body(rank: int) -> Any:
        model: Any = fully_shard(Chosen(), mesh=T.Mesh((2,)))
        model(torch.ones(1, 3), rank).sum().backward()
        gradients = [layer.weight.grad for layer in model.layers]
        return [None if gradient is None else gradient.full_tensor() for gradient in gradients]

    for first, second, third in run_ranks(2, body):
        torch.testing.assert_close(first, torch.full((3, 3), 0.5), rtol=0, atol=0)
        torch.testing.assert_close(second, first, rtol=0, atol=0)
        assert third is None


def test_writes_are_seen_by_what_stays_whole() -> None:
    def body(rank: int) -> float:
        model = fully_shard(nn.Linear(2, 3, bias=False), mesh=T.Mesh((2,)), reshard_after_forward=False)
        with torch.no_grad():
            model(torch.ones(1, 2))
            model.weight.fill_(2)
            return float(model(torch.ones(1, 2)).sum())

    assert run_ranks(2, body) == [12.0, 12.0]


@pytest.mark.extended
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_blocks(reentrant: bool) -> None:
    single = Net()
    loss_of(single, 0).backward()

    class Recomputing(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return cast(torch.Tensor, checkpoint(self.block, x, use_reentrant=reentrant))

    def body(rank: int) -> Any:
        model, arguments, num_parts, part = layout("fsdp", rank)
        blocks = model.get_submodule("blocks")
        for number, block in enumerate(list(blocks.children())):
            blocks._modules[str(number)] = Recomputing(fully_shard(block, **arguments))
        fully_shard(model, **arguments)
        loss_of(model, 0, num_parts, part).backward()
        return {name.replace(".block.", "."): gradient for name, gradient in gradients_of(model).items()}

    for gradients in run_ranks(4, body):
        for name, parameter in single.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)


def test_a_backward_that_raised_leaves_no_gradients_behind() -> None:
    single = Net()
    loss_of(single, 1).backward()

    def fails(grad: torch.Tensor) -> None:
        raise ArithmeticError("a hook of the program")

    def body(rank: int) -> Any:
        model, num_parts, part = sharded("fsdp", rank)
        layer = model.get_submodule("blocks.0.norm")
        hook = layer.register_forward_hook(lambda module, args, output: output.register_hook(fails) and None)
        with pytest.raises(ArithmeticError):
            loss_of(model, 0, num_parts, part).backward()
        assert all(isinstance(parameter, T.DTensor) for parameter in model.parameters())
        with pytest.raises(ArithmeticError):
            loss_of(model, 0, num_parts, part).backward()
        assert all(isinstance(value, T.DTensor) for value in model.state_dict().values())
        hook.remove()
        loss_of(model, 1, num_parts, part).backward()
        return gradients_of(model)

    for gradients in run_ranks(4, body):
        for name, parameter in single.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.extended
def test_two_forwards_before_a_backward() -> None:
    single = Net()
    (loss_of(single, 0) + loss_of(single, 1)).backward()

    def body(rank: int) -> Any:
        model, num_parts, part = sharded("fsdp", rank)
        (loss_of(model, 0, num_parts, part) + loss_of(model, 1, num_parts, part)).backward()
        return gradients_of(model)

    for gradients in run_ranks(4, body):
        for name, parameter in single.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.extended
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
def test_narrow_parameters_and_messages(reduce_dtype: torch.dtype | None) -> None:
    single = Net().to(torch.bfloat16)
    loss_of(single, 0).backward()
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype)

    def body(rank: int) -> Any:
        model, num_parts, part = sharded("fsdp", rank, mp_policy=policy)
        out = model(batch(0)[0].chunk(num_parts)[part])
        loss_of(model, 0, num_parts, part).backward()
        weight = model.get_parameter("head.weight")
        return out.dtype, weight.dtype, weight.grad.full_tensor()

    expected = single.get_parameter("head.weight").grad
    assert expected is not None
    for output, dtype, gradient in run_ranks(4, body):
        assert (output, dtype, gradient.dtype) == (torch.bfloat16, torch.float32, torch.float32)
        torch.testing.assert_close(gradient, expected.float(), rtol=0.1, atol=0.02)


@pytest.mark.extended
def test_outputs_in_a_dtype_of_their_own() -> None:
    def body(rank: int) -> torch.dtype:
        policy = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)
        model = fully_shard(nn.Linear(3, 5), mesh=T.Mesh((2,)), mp_policy=policy)
        found: torch.Tensor = model(torch.ones(2, 3))
        return found.dtype

    assert run_ranks(2, body) == [torch.float32] * 2


@pytest.mark.extended
def test_unshard_and_reshard() -> None:
    def body(rank: int) -> Any:
        model: Any = fully_shard(nn.Linear(3, 5), mesh=T.Mesh((2,)))
        shard = model.weight
        handle = model.unshard(async_op=True)
        handle.wait()
        whole = type(model.weight.data), tuple(model.weight.shape)
        model.reshard()
        return whole, model.weight is shard

    assert run_ranks(2, body) == [((torch.Tensor, (5, 3)), True)] * 2


@pytest.mark.extended
def test_prefetch_lists_change_nothing_but_the_order() -> None:
    def body(rank: int) -> Any:
        model, num_parts, part = sharded("fsdp", rank)
        blocks: Any = list(model.get_submodule("blocks").children())
        model.set_modules_to_forward_prefetch(blocks[:2])
        blocks[2].set_modules_to_backward_prefetch(blocks[:2])
        return train(model, num_parts, part)

    expected = train(Net())
    found = run_ranks(4, body)
    torch.testing.assert_close([sum(each) / 4 for each in zip(*found, strict=True)], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts_travel_between_layouts(assign: bool) -> None:
    values = {name: value + 1 for name, value in Net().state_dict().items()}

    def body(rank: int) -> Any:
        model, _, _ = sharded("fsdp+tp", rank)
        state = {
            name: T.distribute_tensor(
                values[name], held._spec.mesh, held.placements, order=held._spec.order, src_data_rank=None
            )
            for name, held in model.state_dict().items()
        }
        model.load_state_dict(state, assign=assign)
        with torch.no_grad():
            return whole_state(model), loss_of(model, 0).item()

    single = Net()
    single.load_state_dict(values)
    for state, loss in run_ranks(4, body):
        torch.testing.assert_close(state, values, rtol=0, atol=0)
        torch.testing.assert_close(loss, loss_of(single, 0).item(), rtol=0, atol=1e-5)


@pytest.mark.extended
def test_modules_of_one_call_run_one_after_the_other_or_alone() -> None:
    def body(rank: int) -> Any:
        torch.manual_seed(0)
        first, second = nn.Linear(3, 5), nn.Linear(5, 2)
        fully_shard([first, second], mesh=T.Mesh((2,)))
        shards: list[Any] = [first.weight, second.weight]
        first(torch.ones(1, 3)).sum().backward()
        second(first(torch.ones(1, 3))).sum().backward()
        assert first.weight is shards[0]
        assert second.weight is shards[1]
        return [each.grad.full_tensor() for each in shards]

    torch.manual_seed(0)
    first, second = nn.Linear(3, 5), nn.Linear(5, 2)
    (first(torch.ones(1, 3)).sum() + second(first(torch.ones(1, 3))).sum()).backward()
    for gradients in run_ranks(2, body):
        torch.testing.assert_close(gradients, [first.weight.grad, second.weight.grad], rtol=1e-5, atol=1e-6)


@pytest.mark.extended
def test_other_dims_are_cut_where_the_caller_says() -> None:
    def body(rank: int) -> Any:
        torch.manual_seed(0)
        model: Any = fully_shard(nn.Linear(5, 3), mesh=T.Mesh((4,)), shard_placement_fn=by_columns)
        model(torch.ones(2, 5)).sum().backward()
        gradient: Any = model.weight.grad
        return model.weight.placements, gradient.full_tensor()

    for placements, gradient in run_ranks(4, body):
        assert placements == (T.Shard(1),)
        torch.testing.assert_close(gradient, torch.full((3, 5), 2.0), rtol=0, atol=0)


@pytest.mark.extended
def test_ignored_parameters_stay_plain_and_sums_are_divided_as_wanted() -> None:
    def body(rank: int) -> Any:
        model: Any = nn.Linear(3, 5)
        bias = model.bias
        fully_shard(model, mesh=T.Mesh((4,)), ignored_params={bias})
        model.set_gradient_divide_factor(2.0)
        model(torch.ones(2, 3)).sum().backward()
        gradient: Any = model.weight.grad
        return model.bias is bias, bias.grad, gradient.full_tensor()

    for is_kept, of_bias, of_weight in run_ranks(4, body):
        assert is_kept
        torch.testing.assert_close(of_bias, torch.full((5,), 2.0), rtol=0, atol=0)
        torch.testing.assert_close(of_weight, torch.full((5, 3), 4.0), rtol=0, atol=0)


def by_columns(parameter: nn.Parameter) -> T.Shard | None:
    return T.Shard(1) if parameter.ndim == 2 else None
