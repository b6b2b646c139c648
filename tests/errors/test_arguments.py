"""Wrong arguments to every public function, on two ranks: refused in words, on both alike, and the ranks go on."""

import inspect
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import tritondt as T
import tritondt.debug
import tritondt.experimental
import tritondt.fsdp
import tritondt.interop.transformers as transformers
import tritondt.parallel as parallel
import tritondt.random
import tritondt.sharded as sharded
from tests.errors.public_calls import GROUPS, WRONG, Call, cut_rows, pair
from tritondt import nccl
from tritondt.comm.transports.threads import run_ranks
from tritondt.errors import ArgumentError, TritondtError
from tritondt.errors.arguments import check_types
from tritondt.interop.checkpoint_folder import CheckpointFolder

# As programs without type checkers call them.
_t: Any = T
_parallel: Any = parallel
_folder: Any = CheckpointFolder


class _Outcome(NamedTuple):
    kind: str
    text: str


def _outcome(call: Call, argument: str, wrong: Callable[[], Any]) -> _Outcome:
    """The outcome, on this rank, of a call with one wrong argument."""
    given = wrong()
    arguments = {**call.others, **call.arguments, argument: given}
    positional = _starred(call.function, arguments)
    try:
        call.function(*positional, **arguments)
    except (TritondtError, nccl.NcclError) as error:
        return _Outcome("refused", f"{type(error).__name__}: {error}")
    except Exception as error:  # noqa: BLE001  whatever else a caller would see
        return _Outcome("bare", f"{type(error).__name__}: {error}")
    return _Outcome("accepted" if _fits(call.function, argument, given) else "taken", "")


def _fits(function: Callable[..., Any], argument: str, value: Any) -> bool:
    """Whether a value is what the function's annotation says of an argument; so is all that goes on to another one."""
    if isinstance(function, type):
        makers = (vars(owner).get(name) for owner in function.__mro__ for name in ("__init__", "__new__"))
        function = next(made for made in makers if made is not None)
    try:
        check_types(getattr(function, "__func__", function), **{argument: value})
    except ArgumentError:
        return False
    return True


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A text is a path, too: what a call writes there is gone with the test."""
    monkeypatch.chdir(tmp_path)


def _starred(function: Callable[..., Any], arguments: dict[str, Any]) -> list[Any]:
    """Arguments that the function takes by position alone, taken out of those by name."""
    names = [name for name, one in inspect.signature(function).parameters.items() if one.kind is one.VAR_POSITIONAL]
    if not names or names[0] not in arguments:
        return []
    before = [name for name in inspect.signature(function).parameters if name in arguments]
    return [arguments.pop(name) for name in before[: before.index(names[0]) + 1]]


def _goes_on(rank: int) -> bool:
    whole = T.distribute_tensor(torch.arange(6.0), T.Mesh((2,)), [T.Shard(0)]).redistribute(placements=[T.Replicate()])
    return whole.to_local().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


class Found(NamedTuple):
    """A call with one wrong argument, on two ranks."""

    name: str
    outcomes: tuple[_Outcome, ...]
    goes_on: bool


def _swept(group: Callable[[], Iterator[Call]]) -> list[Found]:
    """Outcomes of every call of a group with every wrong argument, in one world for as long as that goes on."""
    cases = run_ranks(2, lambda rank: [(place, name) for place, call in enumerate(group()) for name in call.arguments])
    kinds = list(WRONG)
    # Every other kind for an argument, the rest for the next: half the time, and each kind meets each type somewhere.
    left = [(*case, kind) for number, case in enumerate(cases[0]) for kind in kinds[number % 2 :: 2]]
    found: list[Found] = []
    while left:
        of_ranks: tuple[list[tuple[str, _Outcome, bool]], ...] = ([], [])

        def body(rank: int, left: Any = left, of_ranks: Any = of_ranks) -> None:
            for place, argument, kind in left:
                call = next(islice(group(), place, None))
                name = f"{getattr(call.function, '__qualname__', place)}: {argument} is {kind}"
                of_ranks[rank].append((name, _outcome(call, argument, WRONG[kind]), _goes_on(rank)))

        try:
            run_ranks(2, body)
            broken = None
        except (TritondtError, RuntimeError) as error:
            broken = error
        pairs = list(zip(*of_ranks, strict=False))
        found += [Found(one[0], (one[1], other[1]), one[2] and other[2]) for one, other in pairs]
        if broken is not None:
            place, argument, kind = left[len(pairs)]
            found.append(
                Found(f"{group.__name__} {place}: {argument} is {kind}", (_Outcome("broken", str(broken)),), False)
            )
            pairs.append(of_ranks)
        left = left[len(pairs) :]
    return found


# Not the library's to refuse: the path is of the file system, and the function, which the user gave, raised.
_LARGEST_BARE = 0.05


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__.strip("_"))
@pytest.mark.filterwarnings("ignore")
def test_a_wrong_argument_is_refused_in_words_alike_on_all_ranks_which_go_on(group: Any) -> None:
    found = _swept(group)
    assert len(found) >= 100
    # A value that the annotation does not allow did not pass for another: None as the name "None" of a file.
    assert [one.name for one in found if "taken" in {outcome.kind for outcome in one.outcomes}] == []
    assert [one.name for one in found if not one.goes_on] == []
    # Rank 0 is not on the mesh of rank 1 alone: an error there, and nothing to do here, or the reverse.
    differing = [one for one in found if len({outcome.kind for outcome in one.outcomes}) > 1]
    assert [one.name for one in differing if not one.name.endswith("mesh of one rank")] == []
    bare = [f"{one.name}: {outcome.text}" for one in found for outcome in one.outcomes[:1] if outcome.kind == "bare"]
    assert len(bare) <= _LARGEST_BARE * len(found), "\n".join(bare)


# Nothing to give them, values of torch's own, made by the library alone, or looked at by others.
_WITHOUT_ARGUMENTS = {
    *("DeviceMesh", "MixedPrecisionPolicy", "OffloadPolicy", "NcclCallConfig", "NcclCommunicator", "NcclLibrary"),
    *("DTensor", "Work", "UnshardHandle", "TokensUnderWay", "DispatchedTokens", "Buffer", "Window", "Call", "Count"),
    *("Placement", "Replicate", "ParallelStyle", "PlacementSpec", "ShardingSpec", "Sharder", "ShardingPlanner"),
    *("TensorMeta", "DTensorExtensions", "CommDebugMode", "FSDPModule", "ShardedTensorMetadata", "TensorProperties"),
    *("abort", "accelerate_torch", "close", "empty_cache", "mark_step", "loss_parallel"),
    *(
        "ExplicitRedistributionContext",
        "implicit_replication",
        "register_fsdp_extensions",
    ),
    *("pre_load_state_dict_hook", "state_dict_hook", "from_torch"),
    "ShardingPlan",  # shard_module looks at its values, so that a rank whose plan is wrong tells the others
}


def _is_checked(made: Any) -> bool:
    functions = [vars(made).get(name) for name in ("__init__", "__new__")] if isinstance(made, type) else [made]
    for function in functions:
        found: Any = getattr(function, "__func__", function)
        while found is not None:
            if "tritondt/errors/arguments" in getattr(getattr(found, "__code__", None), "co_filename", ""):
                return True
            found = getattr(found, "__wrapped__", None)
    return False


def test_every_public_function_checks_its_arguments() -> None:
    packages: tuple[Any, ...] = (
        T,
        parallel,
        T.fsdp,
        sharded,
        nccl,
        tritondt.debug,
        T.experimental,
        T.random,
        transformers,
    )
    missing = [
        f"{package.__name__}.{name}"
        for package in packages
        for name in getattr(package, "__all__", ())
        if callable(made := getattr(package, name))
        and not (isinstance(made, type) and issubclass(made, BaseException))
        and name not in _WITHOUT_ARGUMENTS
        and not _is_checked(made)
    ]
    assert missing == []


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: _t.full("ab", 1.0, device_mesh=pair()),
            r"full got size='ab', a str; allowed is int or Sequence\[int\]",
        ),
        (lambda: _t.parse_placements(3), "parse_placements got text=3, an int; allowed is str"),
        (
            lambda: _t.distribute_tensor([1, 2], pair(), [T.Shard(0)]),
            r"distribute_tensor got a list; allowed is a torch\.Tensor: torch\.tensor\(\.\.\.\) makes one",
        ),
        (
            lambda: cut_rows().redistribute(placements=[T.Shard(1)], order=3),
            r"DTensor\.redistribute got order=3, an int; allowed is Sequence\[int or str\] or None",
        ),
        (
            lambda: _parallel.router_z_loss("logits", pair()),
            "router_z_loss got logits='logits', a str; allowed is Tensor",
        ),
        (
            lambda: _parallel.SequenceParallel(sequence_dim="1"),
            "SequenceParallel got sequence_dim='1', a str; allowed is int",
        ),
        (
            lambda: _t.set_timeout(pair()),
            "set_timeout was called with other arguments than it has: missing a required",
        ),
        (lambda: _folder(3), "CheckpointFolder got path=3, an int; allowed is str or Path"),
        (lambda: _t.zeros(4), "no mesh was given, and there is no `with mesh:` around the call; give it a device_mesh"),
    ],
)
def test_the_sentence_says_what_was_given_and_what_is_taken(call: Any, sentence: str) -> None:
    def body(rank: int) -> bool:
        with pytest.raises(TritondtError, match=sentence):
            call()
        return _goes_on(rank)

    assert run_ranks(2, body) == [True, True]


def test_an_error_of_another_cause_stays_as_it_is() -> None:
    def fails(name: str, module: nn.Module, mesh: Any) -> None:
        raise KeyError(name)

    def body(rank: int) -> None:
        with pytest.raises(KeyError):
            T.distribute_module(nn.Linear(2, 2), pair(), fails)
        with pytest.raises(ArgumentError) as caught:
            _t.parse_placements(3)
        assert isinstance(caught.value.__cause__, TypeError | AttributeError)

    run_ranks(2, body)


def test_a_warning_names_the_line_of_the_caller() -> None:
    def body(rank: int) -> str:
        with pytest.warns(UserWarning, match="no parallelize_plan") as told:
            parallel.parallelize_module(nn.Linear(2, 2), pair())
        return told[0].filename

    assert run_ranks(2, body) == [__file__] * 2
