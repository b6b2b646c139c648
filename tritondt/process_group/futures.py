"""Futures of collectives: success and failure as Python reads them, and as torch's C++ does.

DistributedDataParallel's reducer takes the first tensor that it finds in a future's value, and its hook in C++ for
float16 takes nothing but a list of C++. A future that is failed by `Future.set_exception` has neither.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from tritondt.comm.work import again


class FailedTensor(torch.Tensor):
    """The result of a collective that failed, without memory: every operator on it raises the collective's error."""

    _error: BaseException

    @staticmethod
    def __new__(cls: type["FailedTensor"], result: torch.Tensor, error: BaseException) -> "FailedTensor":
        """One in place of a result, of its shape, dtype and device."""
        made: FailedTensor = torch.Tensor._make_wrapper_subclass(
            cls, result.shape, dtype=result.dtype, device=result.device
        )
        made._error = error
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"FailedTensor({self._error!r})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Raises the error of the first failed tensor among the arguments."""
        for found in tree_iter((args, kwargs)):
            if isinstance(found, FailedTensor):
                raise again(found._error) from found._error
        raise AssertionError("an operator on failed tensors has none among its arguments")


def succeed(future: "torch.futures.Future[Any]", results: Sequence[torch.Tensor]) -> None:
    """Gives a future the tensors that were written."""
    future.set_result(list(results))


def fail(future: "torch.futures.Future[Any]", results: Sequence[torch.Tensor], error: BaseException) -> None:
    """Gives a future the error of its collective.

    Python's `wait` and `value` raise it, and what C++ takes for the results raises it at first use. C++'s own errors
    are of no use here: one that holds a Python exception may be raised once, and ends the process the second time.
    """

    def raise_error(_: object) -> None:
        raise again(error) from error

    future._set_unwrap_func(raise_error)
    future.set_result([FailedTensor(result, error) for result in results or [torch.empty(0)]])


def is_list_of_cpp_asked_for(results: Sequence[torch.Tensor]) -> bool:
    """Whether the caller of `get_future`, who calls this, may be DistributedDataParallel's hook in C++ for float16.

    Python's callers name the method. Others ask from within a backward pass, or a method of the reducer.
    """
    if len(results) != 1 or results[0].dtype is not torch.float16:
        return False
    asking = sys._getframe(1).f_back
    return asking is None or "get_future" not in asking.f_code.co_names


def list_of_cpp(results: Sequence[torch.Tensor]) -> "torch.futures.Future[Any]":
    """A future of C++'s own type for lists of tensors, which is there already: Python can complete none of this type.

    >>> list_of_cpp([torch.ones(2)]).value()
    [tensor([1., 1.])]
    """
    made: torch.futures.Future[Any] = torch._C.fork(lambda: list(results))  # type: ignore[assignment]
    return made
