"""Programs as Python to paste and run: what they need of this folder is printed with them."""

from pathlib import Path

from tests.programs import places
from tests.programs.statements import Program

_COMPARING = '''
def check(place, found, expected, tolerances):
    """Compares all variables with those of one device, on every rank."""
    for name, wanted in expected.items():
        got = found[name]
        facts = [(it.shape, it.dtype, it.requires_grad) for it in (got, wanted)]
        assert facts[0] == facts[1], f"{name}: {facts[0]}, expected {facts[1]}"
        steps = [[step for step, length in zip(it.stride(), it.shape) if length > 1] for it in (got, wanted)]
        assert steps[0] == steps[1] or not wanted.numel(), f"{name}: strides {got.stride()}, expected {wanted.stride()}"
        if not wanted.is_inference():
            assert got._version or not wanted._version, f"{name}: its writes are not counted"
        if place.mesh.coordinate is not None or isinstance(got, T.DTensor):
            whole = got.detach().full_tensor()
            if place.mesh.coordinate is not None:
                torch.testing.assert_close(
                    whole, wanted.detach(), rtol=0, atol=tolerances.get(name, 0.0), equal_nan=True,
                    msg=lambda text: f"{name} {got.placements}: {text}\\n{whole}\\nexpected\\n{wanted}",
                )


def tensors(variables):
    found = {name: it for name, it in variables.items() if isinstance(it, torch.Tensor)}
    grads = {name + ".grad": it.grad for name, it in found.items() if it.is_leaf and it.grad is not None}
    return found | grads


def body(rank):
    place = OnMesh(MESH_SHAPE, RANKS)
    check(place, tensors(program(place)), tensors(program(OneDevice())), TOLERANCES)


run_ranks(WORLD_SIZE, body)
print("as on one device")
'''


def printed(program: Program, failure: str = "", tolerances: dict[str, float] | None = None) -> str:
    """The program as Python that runs alone; statements that one device refuses must raise in it."""
    title = f"seed {program.seed}: {failure}".rstrip(": ")
    prelude = Path(places.__file__).read_text()
    _, _, rest = prelude.partition('"""\n\n')
    lines = ["# " + line for line in title.splitlines()]
    lines += [
        "import torch.nn.functional as F",
        rest.rstrip(),
        "",
        "from tritondt.comm.transports.threads import run_ranks",
        "",
    ]
    lines += [f"WORLD_SIZE, MESH_SHAPE, RANKS = {program.world_size}, {program.mesh_shape}, {program.ranks}"]
    lines += [f"TOLERANCES = { {name: value for name, value in (tolerances or {}).items() if value} }", "", ""]
    lines += ["def program(place):"]
    for number, statement in enumerate(program.statements):
        source = statement.source.split("\n")
        if number in program.refused_by_one_device:
            lines += ["    try:  # one device refuses", *(f"        {line}" for line in source)]
            lines += [
                "    except Exception:",
                "        pass",
                "    else:",
                f'        raise AssertionError("nothing raised by {source[-1]!a}")'.replace("\\'", "'"),
            ]
        else:
            lines += [f"    {line}" for line in source]
    lines += ["    return {name: it for name, it in locals().items() if name != 'place'}", "", ""]
    return "\n".join(lines) + _COMPARING


def listing(program: Program) -> str:
    """The statements alone, with the mesh in front."""
    title = f"mesh {program.mesh_shape} of ranks {program.ranks} of {program.world_size}, seed {program.seed}"
    lines = [
        statement.source + ("  # one device refuses" if number in program.refused_by_one_device else "")
        for number, statement in enumerate(program.statements)
    ]
    return "\n".join([title, *lines])
