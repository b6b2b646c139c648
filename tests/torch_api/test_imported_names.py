"""Names that libraries import from torch.distributed.tensor: each is here, or in docs/torch_api.md with a reason.

Read by ast from the wheels of transformers 5.24, torchtitan 0.3, accelerate 1.15, peft 0.21.2 and lightning 2.6.6
(the same in pytorch-lightning), `from ... import` and dotted names alike:

    python -m tests.torch_api.test_imported_names FOLDER  # of unpacked wheels: prints what is not in the lists below
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tritondt as T
import tritondt.experimental
import tritondt.ops
import tritondt.parallel
import tritondt.random
from tests.torch_api.test_dtensor import line
from tritondt.comm.transports.threads import run_ranks

ROOT = "torch.distributed.tensor"
# Modules of torch, and the one here that takes its place.
MODULES = {
    "": T,
    "._dtensor_spec": T,
    "._random": tritondt.random,
    "._utils": T,
    ".experimental": tritondt.experimental,
    ".parallel": tritondt.parallel,
    ".placement_types": T,
}
# Names by torch's module, which before 2.5 was called torch.distributed._tensor.
HERE = {
    "": [
        *("DTensor", "DeviceMesh", "Partial", "Placement", "Replicate", "Shard"),
        *("distribute_module", "distribute_tensor", "DTensor.from_local"),
    ],
    "._dtensor_spec": ["DTensorSpec"],
    "._random": ["manual_seed"],
    "._utils": ["compute_local_shape_and_global_offset"],
    ".experimental": ["implicit_replication", "local_map"],
    ".parallel": ["ParallelStyle", "loss_parallel"],
    ".placement_types": ["Placement", "Replicate", "Shard"],
}
IN_DOCUMENTS = {
    "._redistribute": ["redistribute_local_tensor"],
    ".experimental": ["context_parallel"],
    ".experimental._attention": [
        *("_HeadTailLoadBalancer", "_PTRRLoadBalancer", "_context_parallel_shard"),
        *("_enable_context_parallel_dispatcher", "set_rotate_method"),
    ],
    ".experimental._context_parallel._attention": ["flex_cp_allgather"],
    ".placement_types": ["_StridedShard"],
}


@pytest.mark.parametrize("module", HERE)
def test_names_that_are_here(module: str) -> None:
    for name in HERE[module]:
        found: object = MODULES[module]
        for part in name.split("."):
            found = getattr(found, part)
        assert callable(found) or isinstance(found, type), name


def test_names_that_are_not_here_are_in_the_documents_with_a_reason() -> None:
    text = (Path(__file__).parents[2] / "docs" / "torch_api.md").read_text()
    rows = [row.split("|")[1:-1] for row in text.splitlines() if row.startswith("|")]
    for names in IN_DOCUMENTS.values():
        for name in names:
            assert any(f"`{name}`" in row[0] and row[2].strip(" -") for row in rows if len(row) == 4) or any(
                f".{name}`" in row[0] and row[2].strip(" -") for row in rows if len(row) == 4
            ), name


def test_the_shape_and_offset_of_a_part_are_those_of_torch() -> None:
    def body(rank: int) -> None:
        found = T.compute_local_shape_and_global_offset((10, 4), line(), [T.Shard(0)])
        assert found == (((3, 4), (3 * rank, 0)) if rank < 3 else ((1, 4), (9, 0)))

    run_ranks(4, body)


def imported(folder: Path) -> set[tuple[str, str]]:
    """Modules below torch.distributed.tensor, and names that files of a folder take from them."""
    return {found for path in folder.rglob("*.py") for found in _imported_by(ast.parse(path.read_text()))}


def _imported_by(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            module = node.module.replace("distributed._tensor", "distributed.tensor")
            if module.startswith(ROOT):
                yield from ((module.removeprefix(ROOT), alias.name) for alias in node.names)
        elif isinstance(node, ast.Attribute):
            text = ast.unparse(node).replace("distributed._tensor", "distributed.tensor")
            known = [module for module in (*HERE, *IN_DOCUMENTS) if text.startswith(f"{ROOT}{module}.")]
            if known:
                module = max(known, key=len)
                name = text.removeprefix(f"{ROOT}{module}.")
                if all(part.isidentifier() for part in name.split(".")):
                    yield module, name


if __name__ == "__main__":
    for found_module, found_name in sorted(imported(Path(sys.argv[1]))):
        names = [*HERE.get(found_module, []), *IN_DOCUMENTS.get(found_module, [])]
        is_module = f".{found_name}" in {*HERE, *IN_DOCUMENTS} or f"{found_module}.{found_name}" in {*HERE}
        if found_name not in names and not is_module:
            print(f"{ROOT}{found_module}", found_name)  # noqa: T201
