"""Has the interpreter leave out half of its work, which changes no result (Triton 3.6 to 3.9)."""

import dataclasses
from functools import cache

import pytest
import triton.language as tl
from triton.runtime import interpreter


@pytest.hookimpl(tryfirst=True)  # before the cases of the core are chosen
def pytest_itemcollected(item):
    """Has the core run one case of each: they take a hundred times as long as others."""
    item.add_marker(pytest.mark.in_core(1))


@pytest.fixture(scope="session", autouse=True)
def unsanitized_integers():
    """It computes whether integers overflow, and without `debug` tells nobody."""
    builder = interpreter.interpreter_builder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))
        yield


@cache
def languages(function):
    """Under which names a function finds the language; the language's own functions know it by another than ours."""
    return frozenset(module.__name__ for module in function.__globals__.values() if module is tl or module is tl.core)


@pytest.fixture(scope="session", autouse=True)
def language_is_replaced_once():
    """It replaces the language for a launch, and again for every function that a kernel calls."""
    replace, replaced = interpreter._patch_lang, set[str]()

    def replace_once(function):
        if replaced.issuperset(languages(function)):
            return interpreter._LangPatchScope()
        is_launch, scope = not replaced, replace(function)
        replaced.update(languages(function))
        if is_launch:
            put_back = scope.restore

            def restore():
                replaced.clear()
                put_back()

            scope.restore = restore
        return scope

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", replace_once)
        yield
