"""Examples in docstrings, shown as code: a blank line ends one, as doctest has it."""

from typing import Any

from griffe import Extension, Object


class Doctests(Extension):
    """Puts a fence around each example of a docstring."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Changes the docstring of a module, class or function once it has been read."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """The text of a docstring with its examples in fences.

    >>> print(fenced("Adds.\\n\\n>>> 1 + 1\\n2").replace("`", "'"))
    Adds.
    <BLANKLINE>
    '''pycon
    >>> 1 + 1
    2
    '''
    """
    lines, is_open = list[str](), False
    for line in [*text.splitlines(), ""]:
        if not is_open and line.startswith(">>> "):
            lines.append("```pycon")
            is_open = True
        elif is_open and not line.strip():
            lines.append("```")
            is_open = False
        lines.append(line)
    return "\n".join(lines).rstrip("\n")
