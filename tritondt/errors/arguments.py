"""Arguments of public functions against their annotations: a value of a wrong type is refused in the library's words.

A call pays little for it: an argument is looked at once the call has failed with an error of Python's or torch's own.
No value fails as a flag, as each has a truth: flags are looked at in every call, 0.3 us each. `first` looks at others
before the function runs, where it only keeps them, or uses them where ranks wait for one another.
"""

import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from functools import lru_cache, wraps
from typing import Any, Literal, ParamSpec, TypeVar, Union, cast, get_args, get_origin

from tritondt.errors import ArgumentError, TritondtError

_P = ParamSpec("_P")
_R = TypeVar("_R")
_C = TypeVar("_C", bound=type)

# Names of truth values that are not Python's own, but say what they are: NumPy's in its two versions, and torch's.
_TRUTHS = ("bool_", "bool", "SymBool")
# Errors that a value of a wrong type ends in somewhere below.
_BARE = (
    *(TypeError, AttributeError, ValueError, LookupError, RuntimeError, AssertionError, ArithmeticError),
    *(RecursionError, OSError),
)
# An annotation of a flag, as text, to the types of its values.
_FLAGS: Mapping[str, tuple[type, ...]] = {
    "<class 'bool'>": (bool,),
    "bool": (bool,),
    "bool | None": (bool, types.NoneType),
}
_TEXT_LENGTH = 60
_WORDS = re.compile(r"([^\w.]+)")


def checked(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """The function, whose failure by an argument of a wrong type is an ArgumentError that names it and what it takes.

    Of an argument that is annotated as a bool, so is each call with another value.

    >>> @checked
    ... def half(length: int) -> int:
    ...     return length // 2
    >>> half(4)
    2
    >>> half("four")
    Traceback (most recent call last):
    ...
    tritondt.errors.ArgumentError: half got length='four', a str; allowed is int
    """

    flags = _flags_of(inspect.unwrap(function))

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        for place, name, allowed in flags:
            given: object = args[place] if place < len(args) else kwargs.get(name, False)
            if type(given) not in allowed:
                refuse_misfits(function, args, kwargs, None, (name,))
        try:
            return function(*args, **kwargs)
        except _BARE as error:
            if not isinstance(error, TritondtError | NotImplementedError):
                refuse_misfits(function, args, kwargs, error)
            raise

    return call


def _flags_of(function: Callable[..., Any]) -> tuple[tuple[int, str, tuple[type, ...]], ...]:
    """Place among positional arguments, name, and types of the arguments that are annotated as a bool."""
    code = function.__code__
    by_place, by_name = code.co_argcount, code.co_argcount + code.co_kwonlyargcount
    found = []
    for place, name in enumerate(code.co_varnames[:by_name]):
        allowed = _FLAGS.get(str(function.__annotations__.get(name)))
        if allowed is not None:
            found.append((place if place < by_place else sys.maxsize, name, allowed))
    return tuple(found)


def first(*names: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorator of a function that looks at the arguments `names` before it runs, on all ranks alike.

    It is for what the function only keeps, and for calls of all ranks.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        explained = checked(function)

        @wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            refuse_misfits(function, args, kwargs, None, names)
            return explained(*args, **kwargs)

        return call

    return decorate


def checked_class(cls: _C) -> _C:
    """The class, made and used by its public methods as `checked` functions are called."""
    for name, found in tuple(vars(cls).items()):
        if name.startswith("_") and name not in ("__init__", "__new__"):
            continue
        kind = type(found) if isinstance(found, staticmethod | classmethod) else None
        function = found.__func__ if kind else found
        if inspect.isfunction(function) and len(function.__annotations__) > 1 and not _is_context(function):
            setattr(cls, name, kind(checked(function)) if kind else checked(function))
    return cls


def _is_context(function: Callable[..., Any]) -> bool:
    """Whether a function makes a context manager of a generator, which does not run when it is called."""
    return inspect.isgeneratorfunction(getattr(function, "__wrapped__", None))


def refuse_misfits(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    error: BaseException | None,
    names: Sequence[str] = (),
) -> None:
    """Raises ArgumentError, from `error`, for the first argument that is not of its annotated type, of `names` if any.

    Nothing where all are: then the failure has another cause.
    """
    for name, value, annotation in _given(function, args, kwargs):
        if (not names or name in names) and not fits(value, annotation):
            raise ArgumentError(_misfit_text(function, name, value, annotation)) from error


def _misfit_text(function: Callable[..., Any], name: str, value: Any, annotation: Any) -> str:
    given = f"{name}={_text(value)}, {_article(type(value).__name__)}"
    return f"{_name_of(function)} got {given}; allowed is {_allowed(annotation)}"


def check_types(function: Callable[..., Any], **given: Any) -> None:
    """Raises ArgumentError for the first of these arguments of a function that is not of its annotated type."""
    hints = _signature(inspect.unwrap(function))[1]
    for name, value in given.items():
        if name in hints and not fits(value, hints[name]):
            raise ArgumentError(_misfit_text(function, name, value, hints[name]))


def fits(value: Any, annotation: Any) -> bool:
    """Whether a value is of an annotated type; yes where that cannot be told.

    >>> fits([1, 2], Sequence[int]), fits("12", Sequence[int]), fits(None, int | None), fits(True, int)
    (True, False, True, False)
    """
    origin = get_origin(annotation)
    if annotation is Any:
        return True
    if isinstance(annotation, TypeVar):
        return annotation.__bound__ is None or fits(value, annotation.__bound__)
    if annotation is None or annotation is types.NoneType:
        return value is None
    if origin in (Union, types.UnionType):
        return any(fits(value, one) for one in get_args(annotation))
    if origin is Literal:
        return any(value == one for one in get_args(annotation))
    if origin is type:
        return isinstance(value, type)
    if isinstance(origin, type):
        return _fits_generic(value, origin, get_args(annotation))
    return not isinstance(annotation, type) or _is_a(value, annotation)


def _fits_generic(value: Any, origin: type, items: tuple[Any, ...]) -> bool:
    """Whether a value is a collection as annotated, with items as annotated where these can be looked at."""
    if not isinstance(value, origin) or (isinstance(value, str | bytes) and origin is not type(value)):
        return _is_of_torch(value)
    if issubclass(origin, Mapping) and items:
        pairs = cast("Mapping[Any, Any]", value).items()
        return all(fits(key, items[0]) and fits(item, items[1]) for key, item in pairs)
    if isinstance(value, tuple) and origin is tuple and items and items[-1] is not Ellipsis:
        return len(value) == len(items) and all(map(fits, value, items))
    if issubclass(origin, Iterable) and isinstance(value, Sized) and items and not _is_tensor(value):
        return all(fits(item, items[0]) for item in cast("Iterable[Any]", value))
    return True


def _is_a(value: Any, kind: type) -> bool:
    """isinstance, with numbers of torch and NumPy as Python's, and with torch's placements as ours, which they become.

    A bool is no number here: `dim=True` is a slip.
    """
    if isinstance(value, bool) and kind in (int, float):
        return False
    if kind is bool:
        return isinstance(value, bool) or type(value).__name__ in _TRUTHS
    if kind is int:
        return isinstance(value, int) or (hasattr(value, "__index__") and not _is_tensor(value))
    if kind is float:
        return value.numel() == 1 if _is_tensor(value) else hasattr(value, "__float__")
    if getattr(kind, "_is_protocol", False):
        return True
    return isinstance(value, kind) or _is_of_torch(value)


def _is_of_torch(value: Any) -> bool:
    """Whether a value is of torch.distributed.tensor, which is converted, or refused in words of its own."""
    return type(value).__module__.startswith("torch.distributed.tensor")


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "untyped_storage")


def _given(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterable[tuple[str, Any, Any]]:
    """Name, value and annotation of every argument that was given; none where they do not bind at all."""
    signature, hints = _signature(function)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ArgumentError(f"{_name_of(function)} was called with other arguments than it has: {error}") from error
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        values = value if kind is inspect.Parameter.VAR_POSITIONAL else (value,)
        if name not in ("self", "cls") and name in hints and kind is not inspect.Parameter.VAR_KEYWORD:
            for one in values:
                yield name, one, hints[name]


@lru_cache(maxsize=512)
def _signature(function: Callable[..., Any]) -> tuple[inspect.Signature, dict[str, Any]]:
    """Signature of a function, and its annotations as far as their names are known in its module."""
    function = inspect.unwrap(function)  # the annotations' names are those of its own module
    scope = dict(vars(typing))
    scope.update(function.__globals__)
    hints: dict[str, Any] = {}
    for name, annotation in function.__annotations__.items():
        found = _evaluated(annotation, scope)
        if found is not inspect.Parameter.empty:
            hints[name] = found
    return inspect.signature(function), hints


def _evaluated(annotation: Any, scope: dict[str, Any]) -> Any:
    """An annotation with its text read; empty for a text with names that are known to type checkers alone."""
    try:
        holder = types.FunctionType((lambda: None).__code__, scope)
        holder.__annotations__ = {"value": annotation}
        return typing.get_type_hints(holder, scope)["value"]
    except (NameError, TypeError, AttributeError):
        return inspect.Parameter.empty


def _name_of(function: Callable[..., Any]) -> str:
    """How a caller writes the function: the class for what makes one, else the name within its class."""
    owner, _, name = function.__qualname__.rpartition(".")
    owner = owner.rpartition("<locals>.")[2]
    if name in ("__init__", "__new__"):
        return owner
    return f"{owner}.{name}" if owner else name


def _text(value: Any) -> str:
    """A value in a sentence: its repr, shortened; a tensor's shape, for its values would be read from all over."""
    if _is_tensor(value):
        return f"a tensor of shape {tuple(value.shape)}"
    try:
        text = repr(value)
    except _BARE:
        text = f"a {type(value).__name__}"
    text = " ".join(text.split())
    return text if len(text) <= _TEXT_LENGTH else f"{text[:_TEXT_LENGTH]}..."


def _article(kind: str) -> str:
    return f"{'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}"


def _allowed(annotation: Any) -> str:
    """An annotation in a sentence: names without their modules."""
    if isinstance(annotation, TypeVar):
        annotation = annotation.__bound__
    if isinstance(annotation, type) and not get_args(annotation):
        return annotation.__name__
    text = inspect.formatannotation(annotation).replace("typing.", "").replace("NoneType", "None")
    words = [word.rpartition(".")[2] if "." in word and "..." not in word else word for word in _WORDS.split(text)]
    return "".join(words).replace(" | ", " or ")
