"""Models that are saved by parts, and loaded by parts on other numbers of ranks and by transformers on one process."""

import copy
import json
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch.testing import assert_close

import tritondt as T
from tests.interop.transformers import models
from tritondt.comm.transports.threads import run_ranks
from tritondt.errors import CheckpointError
from tritondt.interop.transformers import from_pretrained, loading, parallelize, save_pretrained, saving
from tritondt.interop.transformers.weight_files import Weight, files_for, weights_in

CASES = [
    ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    ("BertForMaskedLM", {}),
    ("GPT2LMHeadModel", {}),
    ("MixtralForCausalLM", {"experts_implementation": "eager"}),
    ("Qwen3ForCausalLM", {}),
]


def whole_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def save(folder: Path, name: str = "LlamaForCausalLM", num_ranks: int = 4, **options: Any) -> dict[str, torch.Tensor]:
    """Weights of a model after a step of training, which is saved by these ranks."""

    def body(rank: int) -> dict[str, torch.Tensor]:
        model = parallelize(models.model_of(getattr(transformers, name), **options), T.Mesh((num_ranks,)))
        models.train(model, 1)
        save_pretrained(model, folder)
        return whole_of(model)

    return run_ranks(num_ranks, body)[0]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_saved_on_four_ranks_and_loaded_on_three_and_by_transformers_bit_by_bit(name, options, tmp_path):
    expected = save(tmp_path, name, **options)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == [f"model-0000{place}-of-00004.safetensors" for place in (1, 2, 3, 4)]
    sizes = [path.stat().st_size for path in tmp_path.glob("*.safetensors")]
    assert max(sizes) < 2 * min(sizes), "bytes are dealt out"

    def body(rank: int) -> dict[str, torch.Tensor]:
        model = from_pretrained(tmp_path, T.Mesh((3,)), **({} if name != "MixtralForCausalLM" else options))
        assert type(model).__name__ == name
        assert not model.training
        assert {type(parameter.data) for parameter in model.parameters()} == {T.DTensor}
        return whole_of(model)

    for found in run_ranks(3, body):
        assert_close(found, expected, rtol=0, atol=0)
    alone = getattr(transformers, name).from_pretrained(tmp_path)
    assert_close(dict(alone.state_dict()), expected, rtol=0, atol=0)


def test_a_loaded_model_computes_what_the_saved_one_does(tmp_path):
    save(tmp_path, tie_word_embeddings=True)
    alone = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    expected = alone(models.TOKENS).logits

    def body(rank: int) -> tuple[torch.Tensor, list[float]]:
        model = from_pretrained(tmp_path, T.Mesh((3,)), attn_implementation="eager")
        assert model.lm_head.weight is model.model.embed_tokens.weight
        return model(models.TOKENS).logits, models.train(model)

    trained = models.train(alone)
    for logits, losses in run_ranks(3, body):
        assert_close(logits, expected, rtol=1e-4, atol=1e-5)
        assert_close(losses, trained, rtol=1e-4, atol=1e-5)


def test_a_folder_of_transformers_is_loaded_in_another_dtype(tmp_path):
    single = models.model_of(transformers.Qwen3ForCausalLM)
    single.save_pretrained(tmp_path)

    def body(rank: int) -> dict[str, torch.Tensor]:
        model = from_pretrained(tmp_path, T.Mesh((2,)), transformers.Qwen3ForCausalLM, dtype=torch.bfloat16)
        return whole_of(model)

    assert_close(run_ranks(2, body)[1], dict(single.bfloat16().state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("MixtralForCausalLM", {"num_local_experts": 11}),  # the tenth comes behind the ninth, not behind the first
        ("GPT2LMHeadModel", {}),
    ],
)
def test_files_with_a_tensor_for_each_expert_and_those_of_a_base_model_are_loaded(name, options, tmp_path):
    single = models.model_of(getattr(transformers, name), **options)
    (single if name == "MixtralForCausalLM" else single.base_model).save_pretrained(tmp_path)
    named = weights_in(tmp_path)
    assert "model.layers.1.block_sparse_moe.experts.10.w3.weight" in named or "h.0.attn.c_attn.weight" in named

    def body(rank: int) -> dict[str, torch.Tensor]:
        return whole_of(from_pretrained(tmp_path, T.Mesh((4,)), getattr(transformers, name)))

    for found in run_ranks(4, body):
        assert_close(found, dict(single.state_dict()), rtol=0, atol=0)


def test_experts_of_which_one_is_missing_are_refused(tmp_path):
    models.model_of(transformers.MixtralForCausalLM).save_pretrained(tmp_path)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.block_sparse_moe.experts.3.w3.weight"]
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")

    def body(rank: int) -> None:
        said = r"model.layers.1.mlp.experts.gate_up_proj has 5 of \S+, 4 of \S+ in the files; allowed are as many"
        with pytest.raises(CheckpointError, match=said):
            from_pretrained(tmp_path, T.Mesh((2,)))

    run_ranks(2, body)


def test_a_new_save_removes_the_files_of_the_one_before(tmp_path):
    save(tmp_path, num_ranks=4)
    expected = save(tmp_path, num_ranks=2, tie_word_embeddings=True)
    names = {path.name for path in tmp_path.iterdir()}
    files = {f"model-0000{place}-of-00002.safetensors" for place in (1, 2)}
    assert names == files | {"model.safetensors.index.json", "config.json", "generation_config.json"}
    found = run_ranks(1, lambda rank: whole_of(from_pretrained(tmp_path, T.Mesh((1,)))))[0]
    assert_close(found, expected, rtol=0, atol=0)


def test_a_rank_reads_its_part_alone(tmp_path, monkeypatch):
    save(tmp_path)
    read: dict[int, int] = {}
    original = loading._Slices.of

    def counted(slices: Any, name: str, box: tuple[slice, ...]) -> torch.Tensor:
        found = original(slices, name, box)
        read[threading.get_ident()] = read.get(threading.get_ident(), 0) + found.numel()
        return found

    def body(rank: int) -> tuple[int, int]:
        model = from_pretrained(tmp_path, T.Mesh((4,)))
        held = sum(parameter.to_local().numel() for parameter in model.parameters())
        return held, read[threading.get_ident()]

    monkeypatch.setattr(loading._Slices, "of", counted)
    whole = sum(weight.num_bytes for weight, _ in weights_in(tmp_path).values()) // 4  # of float32
    for held, num_read in run_ranks(4, body):
        assert num_read == held < 0.4 * whole


def test_what_travels_together_is_bounded_for_each_owner(monkeypatch):
    monkeypatch.setattr(saving, "_BUCKET_BYTES", 100)
    weights = [Weight(str(size), (size,), torch.float32) for size in (60, 9, 8, 7, 5, 3, 2, 1, 0)]
    files = files_for(weights, 2)
    sizes = {weight.name: weight.num_bytes for weight in weights}
    buckets = list(saving._buckets(files))
    for bucket in buckets:
        for owner in (0, 1):
            own = [sizes[name] for name, of in bucket if of == owner]
            assert sum(own) <= 100 or len(own) == 1
    assert sorted(name for bucket in buckets for name, _ in bucket) == sorted(sizes)
    assert [[weight.name for weight in file.weights] for file in files] == [
        ["60"],
        ["9", "8", "7", "5", "3", "2", "1", "0"],
    ]


def test_a_model_over_two_axes_is_whole_with_its_owners(tmp_path):
    def body(rank: int) -> None:
        model = torch.nn.Linear(5, 3)
        mesh = T.Mesh((2, 2))
        for name, placements in (("weight", [T.Shard(0), T.Shard(1)]), ("bias", [T.Shard(0), T.Replicate()])):
            whole = T.distribute_tensor(
                torch.arange(15.0).view(3, 5) if name == "weight" else torch.arange(3.0), mesh, placements
            )
            model._parameters[name] = torch.nn.Parameter(whole)
        model.register_parameter(
            "scale", torch.nn.Parameter(T.distribute_tensor(torch.tensor(7.0), mesh, [T.Replicate()] * 2))
        )
        model.register_buffer("steps", torch.tensor([4], dtype=torch.int64))
        save_pretrained(model, tmp_path)

    run_ranks(4, body)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == 4
    found = {name: tensor for file in files for name, tensor in safetensors.torch.load_file(file).items()}
    expected = {
        "weight": torch.arange(15.0).view(3, 5),
        "bias": torch.arange(3.0),
        "scale": torch.tensor(7.0),
        "steps": torch.tensor([4]),
    }
    assert_close(found, expected, rtol=0, atol=0)


def shorten(folder: Path) -> None:
    path = folder / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-5])


def shorten_header(folder: Path) -> None:
    path = folder / "model-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:100])


def rewrite(folder: Path, change: Any) -> None:
    path = folder / "model-00001-of-00002.safetensors"
    tensors = safetensors.torch.load_file(path)
    name = next(iter(tensors))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    change(tensors, index["weight_map"], name, path.name)
    safetensors.torch.save_file(tensors, path)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def lose(tensors: Any, places: Any, name: str, file: str) -> None:
    del tensors[name], places[name]


def add(tensors: Any, places: Any, name: str, file: str) -> None:
    tensors["model.layers.7.bias"] = torch.zeros(2)
    places["model.layers.7.bias"] = file


def reshape(tensors: Any, places: Any, name: str, file: str) -> None:
    tensors[name] = tensors[name][:-1].contiguous()


def lose_in_file(tensors: Any, places: Any, name: str, file: str) -> None:
    del tensors[name]


def spoil_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b"}}')


DAMAGE = [
    (
        shorten,
        r"model-00002-of-00002.safetensors has \d+ bytes, and its header speaks of \d+: it is truncated or damaged",
    ),
    (shorten_header, "model-00001-of-00002.safetensors has 100 bytes and no whole header of a safetensors file"),
    (lambda folder: rewrite(folder, lose), r"does not fit LlamaForCausalLM: it lacks \S+ and has nothing, which"),
    (lambda folder: rewrite(folder, add), "it lacks nothing and has model.layers.7.bias, which the model has not"),
    (lambda folder: rewrite(folder, reshape), r"is \(\d+, \d+\) in .*, and \(\d+, \d+\) in LlamaForCausalLM"),
    (lambda folder: rewrite(folder, lose_in_file), "which has no tensor of that name"),
    (spoil_index, "the weight_map of .* allowed are names of files beside it"),
    (lambda folder: (folder / "model-00001-of-00002.safetensors").unlink(), "cannot be read: .*No such file"),
    (lambda folder: (folder / "model.safetensors.index.json").unlink(), "has neither model.safetensors nor model.safe"),
    (lambda folder: (folder / "config.json").unlink(), "has no config.json; allowed is a folder that save_pretrained"),
    (
        lambda folder: (folder / "config.json").write_text('{"model_type": "llama", "architectures": ["Lama"]}'),
        "no class",
    ),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save(folder, num_ranks=2)
    return folder


@pytest.mark.in_core(4)
@pytest.mark.parametrize(("damage", "said"), DAMAGE, ids=range(len(DAMAGE)))
def test_what_one_rank_cannot_take_is_refused_on_all(damage, said, saved, tmp_path):
    folders = [saved if rank != 1 else tmp_path / "copy" for rank in range(3)]
    shutil.copytree(saved, folders[1])
    damage(folders[1])

    def body(rank: int) -> str:
        with pytest.raises(CheckpointError) as caught:
            from_pretrained(folders[rank], T.Mesh((3,)))
        return str(caught.value)

    found = run_ranks(3, body)
    assert len(set(found)) == 1
    assert re.match("rank 1 failed while reading a model: ", found[0]), found[0]
    assert re.search(said, found[0]), found[0]


def test_where_one_rank_cannot_write_nothing_is_written(tmp_path):
    (tmp_path / ".draft-model-00002-of-00003.safetensors").mkdir()

    def body(rank: int) -> str:
        model = parallelize(models.model_of(transformers.LlamaForCausalLM), T.Mesh((3,)))
        with pytest.raises(CheckpointError, match="rank 1 failed while writing a model: IsADirectoryError: ") as caught:
            save_pretrained(model, tmp_path)
        return str(caught.value)

    assert len(set(run_ranks(3, body))) == 1
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == []


def test_the_models_own_method_saves_by_parts_and_takes_the_folder_alone(tmp_path):
    def body(rank: int) -> dict[str, torch.Tensor]:
        model = copy.deepcopy(parallelize(models.model_of(transformers.GPT2LMHeadModel), T.Mesh((3,))))
        with torch.no_grad():
            model.transformer.ln_f.weight += 1  # of the copy, whose method it is
        with pytest.raises(CheckpointError, match="of a parallelized GPT2LMHeadModel was given push_to_hub, max_shard"):
            model.save_pretrained(tmp_path, push_to_hub=True, max_shard_size="1GB")
        model.save_pretrained(tmp_path, is_main_process=rank == 0, push_to_hub=False)
        return whole_of(model)

    expected = run_ranks(3, body)[0]
    alone = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert_close(dict(alone.state_dict()), expected, rtol=0, atol=0)


def test_a_plain_model_and_one_on_two_meshes_are_refused(tmp_path):
    def body(rank: int) -> None:
        model = models.model_of(transformers.LlamaForCausalLM)
        with pytest.raises(CheckpointError, match="distributed over one mesh, found none; a plain model has"):
            save_pretrained(model, tmp_path)
        parallelize(model, T.Mesh((2,)))
        weight = torch.nn.Parameter(T.distribute_tensor(torch.ones(24), T.Mesh((1, 2)), [T.Replicate()] * 2))
        model.model.norm.weight = weight
        with pytest.raises(CheckpointError, match=r"found .*\(model\.\S+\) and .*\(model\.norm\.weight\)"):
            save_pretrained(model, tmp_path)

    run_ranks(2, body)
    assert not list(tmp_path.iterdir())


def test_modules_of_other_threads_keep_their_memory_and_contexts_end_in_any_order() -> None:
    """nn.Module had the function of a context that had ended, where two ended in the order of their beginning."""
    made: dict[str, str] = {}

    def elsewhere() -> None:
        made["another thread's"] = torch.nn.Linear(1, 1).weight.device.type

    before = torch.nn.Module.register_parameter
    first, second = loading._parameters_on_meta(), loading._parameters_on_meta()
    first.__enter__()
    second.__enter__()
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    first.__exit__(None, None, None)
    made["within"] = torch.nn.Linear(1, 1).weight.device.type
    second.__exit__(None, None, None)
    made["after"] = torch.nn.Linear(1, 1).weight.device.type
    assert made == {"another thread's": "cpu", "within": "meta", "after": "cpu"}
    assert torch.nn.Module.register_parameter is before
