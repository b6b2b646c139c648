"""Sentences of the documentation and of docstrings that open with a word that makes them hard to read.

    python -m tests.tools.prose

A sentence whose first word is What, Those, Whoever or Such has its reader wait for the subject. Each is printed in a
line, and status 1 says that there are some.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PAGES = ("*.md", "docs/**/*.md", "*/README.md", "tritondt/*/README.md", "tests/**/*.md")
SOURCES = ("tritondt/**/*.py", "kernels/**/*.py", "examples/*.py", "benchmarks/**/*.py", "docs/_site/*.py", "setup.py")
_OPENER = re.compile(r"(?:^|(?<=[.!?:;] )|(?<=[.!?] [\"'(]))(What|Those|Whoever|Such)\b")
# Headings, list items, table cells and quotes begin a sentence, too.
_MARKS = re.compile(r"^(?:#+|[-*>]|\d+\.|\|)\s+")
_FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)


def found_in(text: str) -> Iterator[tuple[int, str]]:
    """Line numbers and beginnings of sentences that open so, in Markdown or a docstring.

    >>> list(found_in("A rank waits.\\nWhat it has sent stays. It may\\nbe what others need."))
    [(2, 'What it has sent stays. It may be what others need.')]
    """
    text = _FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), text)
    number = 1
    for paragraph in re.split(r"(\n[ \t]*\n|\n(?=[ \t]*(?:#+|[-*>]|\d+\.|\|)\s))", text):
        lines = [line.strip() for line in paragraph.strip().splitlines()]
        joined = _MARKS.sub("", " ".join(lines)).replace("**", "")
        for match in _OPENER.finditer(joined):
            passed, before = 0, _MARKS.sub("", lines[0]).replace("**", "") if lines else ""
            while len(before) <= match.start() and passed + 1 < len(lines):
                passed += 1
                before += " " + lines[passed].replace("**", "")
            yield number + passed, joined[match.start() : match.start() + 80]
        number += paragraph.count("\n")


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """The docstrings of a module, with their line numbers."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text is not None:
                yield node.body[0].lineno, text


def all_found() -> Iterator[str]:
    """A line for each such sentence of the repository: file, line, and how it begins."""
    for pattern in PAGES:
        for path in sorted(REPOSITORY.glob(pattern)):
            for number, text in found_in(path.read_text()):
                yield f"{path.relative_to(REPOSITORY)}:{number}: {text}"
    for pattern in SOURCES:
        for path in sorted(REPOSITORY.glob(pattern)):
            if "kernels" in path.relative_to(REPOSITORY).parts[:2] and path.is_relative_to(REPOSITORY / "tritondt"):
                continue  # a link to kernels/
            for line, docstring in docstrings(path.read_text()):
                for number, text in found_in(docstring):
                    yield f"{path.relative_to(REPOSITORY)}:{line + number - 1}: {text}"


if __name__ == "__main__":
    lines = list(all_found())
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.exit(bool(lines))
