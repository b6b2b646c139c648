"""Sentences of the documentation and of public docstrings, drawn at random for a second reader.

    python -m tests.tools.prose_sample --seed 1

Each is printed with its file and line, or with the name that it documents. The same seed draws the same sentences from
the same text. Code, headings and doctests are no sentences; a cell of a table is one from six words on.
docs/internals/prose_sample.md holds the drawings that were read, and what became of them.
"""

import argparse
import inspect
import random
import re
import sys
from collections.abc import Iterator

from tests.packaging.test_documented import ROOMS
from tests.tools.prose import REPOSITORY

PAGES = ("README.md", "docs/*.md", "docs/decisions/*.md")
# Words below which a piece of text is a label rather than a sentence.
LEAST_WORDS = 6
_FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:^ {4,}\S.*\n?)+", re.MULTILINE)
_MARKS = re.compile(r"^(?:[-*>]|\d+\.)\s+")
_END = re.compile(r"(?<=[.!?])[\"')]*\s+(?=[\"'(`*\[]*[A-Z`])|(?<=:)\n(?=\n)")


def sentences_of(text: str) -> Iterator[tuple[int, str]]:
    """Line numbers and sentences of Markdown or of a docstring.

    >>> list(sentences_of("# Title\\n\\nA rank waits for all its peers. It then\\nsends what it has packed before."))
    [(3, 'A rank waits for all its peers.'), (3, 'It then sends what it has packed before.')]
    >>> [sentence for _, sentence in sentences_of("| a | every rank holds all of the tensor |")]
    ['every rank holds all of the tensor']
    """

    def blank(match: re.Match[str]) -> str:
        return "\n" * match[0].count("\n")

    text = _INDENTED.sub(blank, _FENCE.sub(blank, text))
    number = 1
    for part in re.split(r"(\n[ \t]*\n|\n(?=[ \t]*(?:#+|[-*>]|\d+\.|\|)\s))", text):
        stripped = part.strip()
        first = number + part[: len(part) - len(part.lstrip())].count("\n")
        number += part.count("\n")
        if not stripped or stripped.startswith(("#", ">>>", "|--", "|:-", "::: ", "!!!", "![")):
            continue
        pieces = stripped.strip("|").split(" | ") if stripped.startswith("|") else [_MARKS.sub("", stripped)]
        for piece in pieces:
            for sentence in _END.split(piece):
                joined = " ".join(sentence.split())
                if len(re.findall(r"[A-Za-z]{2,}", re.sub(r"`[^`]*`", "", joined))) >= LEAST_WORDS:
                    yield first, joined


def public_docstrings() -> Iterator[tuple[str, str]]:
    """Places and docstrings, without their doctests, of public packages and of what they name in `__all__`."""
    seen = set()
    for room in ROOMS:
        objects = [room, *(getattr(room, name) for name in room.__all__)]
        classes = [found for found in objects if inspect.isclass(found)]
        objects += [value for found in classes for name, value in vars(found).items() if not name.startswith("_")]
        for value in objects:
            found = getattr(value, "fget", None) or getattr(value, "__func__", None) or inspect.unwrap(value)
            module = found.__name__ if inspect.ismodule(found) else getattr(found, "__module__", None) or ""
            text = getattr(found, "__doc__", None)
            # Names of the extension have signatures that pybind11 writes.
            if module.startswith("tritondt._C") or not module.startswith(("tritondt", "kernels")):
                continue
            if not text or id(found) in seen:
                continue
            seen.add(id(found))
            place = f"{module}.{found.__qualname__}" if hasattr(found, "__qualname__") else module
            yield (
                place,
                re.sub(r"^>>> .*?(?=\n[ \t]*\n|\Z)", "", inspect.cleandoc(text), flags=re.MULTILINE | re.DOTALL),
            )


def all_sentences() -> list[tuple[str, str]]:
    """Places and sentences: README.md and the pages of docs/, then the public packages' docstrings."""
    found: list[tuple[str, str]] = []
    for path in (path for pattern in PAGES for path in sorted(REPOSITORY.glob(pattern))):
        name = path.relative_to(REPOSITORY)
        found += [(f"{name}:{line}", sentence) for line, sentence in sentences_of(path.read_text())]
    for place, text in public_docstrings():
        found += [(place, sentence) for _, sentence in sentences_of(text)]
    return found


def main() -> None:
    """Prints the sentences that a seed draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--sentences", type=int, default=100)
    asked = parser.parse_args()
    everything = all_sentences()
    drawn = sorted(random.Random(asked.seed).sample(range(len(everything)), asked.sentences))
    sys.stdout.write(f"{asked.sentences} of {len(everything)} sentences, seed {asked.seed}\n")
    for index, number in enumerate(drawn, 1):
        place, sentence = everything[number]
        sys.stdout.write(f"{index}. {place}: {sentence}\n")


if __name__ == "__main__":
    main()
