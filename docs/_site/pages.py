"""Pages of the documentation site that are made of other files, and the links between all pages.

README.md is the first page; docs/README.md, the list of all pages, comes behind it. The guide is one file for those who
read it in the repository, and a page per task on the site. Examples, the public packages' docstrings and the files
beside README.md become pages of their own. A link that leaves docs/ leads to the page that was made of its file.
"""

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
GUIDE = "guide.md"
# Files beside README.md that are pages.
CONTENTS = "contents.md"
BESIDE = {
    "README.md": "README.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
# Public packages, as the Makefile's PUBLIC names them.
PACKAGES = ("", "debug", "experimental", "found_plan", "fsdp", "nccl", "ops", "parallel", "random", "sharded")
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^(#{1,6}) +(.+?) *$")


def on_config(config: Any) -> Any:
    """Fills in the parts of the navigation that are lists of made pages."""
    decisions = sorted(path.name for path in (ROOT / "docs" / "decisions").glob("*.md") if path.name != "README.md")
    parts = {
        "guide": [f"guide/{name}" for name in _guide()],
        "examples": ["examples/README.md", *(f"examples/{path.stem}.md" for path in _examples())],
        "reference": [f"reference/{_reference(package)}" for package in PACKAGES],
        "decisions": ["decisions/README.md", *(f"decisions/{name}" for name in decisions)],
    }
    config.nav = _with_parts(config.nav, parts)
    return config


def _with_parts(item: Any, parts: dict[str, list[str]]) -> Any:
    if isinstance(item, list):
        return [_with_parts(each, parts) for each in item]
    if isinstance(item, dict):
        return {title: _with_parts(value, parts) for title, value in item.items()}
    return parts.get(item, item)


def on_files(files: Files, config: Any) -> Files:
    """Adds the made pages, and takes out the guide that they stand for."""
    guide = files.get_file_from_path(GUIDE)
    if guide is None:
        raise PluginError(f"docs/{GUIDE} is missing")
    files.remove(guide)
    contents = files.get_file_from_path("README.md")
    if contents is None:
        raise PluginError("docs/README.md is missing")
    files.remove(contents)
    made = {CONTENTS: (ROOT / "docs" / "README.md").read_text()}
    made |= {f"guide/{name}": text for name, text in _guide().items()}
    made |= {page: (ROOT / name).read_text().replace("](docs/images/", "](images/") for name, page in BESIDE.items()}
    made["examples/README.md"] = (ROOT / "examples" / "README.md").read_text()
    made |= {f"examples/{path.stem}.md": _example(path) for path in _examples()}
    made |= {f"reference/{_reference(package)}": _described(package) for package in PACKAGES}
    for uri, text in made.items():
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Leads links to the made pages, and shows the name alone of a file that is no page."""

    def led(match: re.Match[str]) -> str:
        text, target = match.groups()
        if "://" in target or target.startswith(("#", "mailto:")):
            if target.startswith("#") and page.file.src_uri.startswith("guide/"):
                return _link(text, f"guide/{_page_of(target[1:])}", target[1:], page.file.src_uri)
            return match[0]
        path, _, anchor = target.partition("#")
        uri = _uri_of(posixpath.normpath(posixpath.join(_source_folder(page.file.src_uri), path)), anchor)
        return match[0] if uri is None else _link(text, uri, anchor, page.file.src_uri) if uri else text

    fences = re.split(r"(^```.*?^```|^(?: {4,}.*\n)+)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith(("```", "    ")) else _LINK.sub(led, part) for part in fences)


def _link(text: str, uri: str, anchor: str, start: str) -> str:
    path = posixpath.relpath(uri, posixpath.dirname(start) or ".")
    return f"[{text}]({path}{f'#{anchor}' if anchor else ''})"


def _source_folder(uri: str) -> str:
    """The folder of the repository that links of a page start from."""
    if uri in BESIDE.values():
        return "."
    if uri.startswith("guide/"):
        return "docs"
    return posixpath.dirname(uri) if uri.startswith("examples/") else posixpath.join("docs", posixpath.dirname(uri))


def _uri_of(path: str, anchor: str) -> str | None:
    """The page of a file of the repository; an empty text where it is none."""
    if path == f"docs/{GUIDE}":
        return f"guide/{_page_of(anchor)}"
    if path in BESIDE:
        return BESIDE[path]
    if path == "docs/README.md":
        return CONTENTS
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.startswith("examples/") and path.endswith((".py", ".md")):
        return path.removesuffix(".py") + ".md" if path.endswith(".py") else path
    if not (ROOT / path).exists():
        raise PluginError(f"a page links to {path}, which does not exist")
    return ""


def _guide() -> dict[str, str]:
    """The guide's pages by file name: its opening, and a page for each chapter."""
    found, lines, name, in_code = {}, list[str](), "README.md", False
    for line in (ROOT / "docs" / GUIDE).read_text().splitlines():
        in_code ^= line.startswith("```")
        heading = None if in_code else _HEADING.match(line)
        if heading is not None and heading[1] == "##":
            found[name], lines, name = "\n".join(lines) + "\n", [], f"{_slug(heading[2])}.md"
        lines.append(line if heading is None or heading[1] == "#" else line.removeprefix("#"))
    found[name] = "\n".join(lines) + "\n"
    return found


def _page_of(anchor: str) -> str:
    """The guide's page that has a heading; its first page without one."""
    if not anchor:
        return "README.md"
    for name, text in _guide().items():
        headings = filter(None, map(_HEADING.match, text.splitlines()))
        if anchor in {_slug(heading[2]) for heading in headings}:
            return name
    raise PluginError(f"a page links to docs/{GUIDE}#{anchor}; the guide has no such heading")


def _slug(heading: str) -> str:
    """The anchor of a heading, as Markdown's table of contents makes it."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def _examples() -> list[Path]:
    return sorted((ROOT / "examples").glob("*.py"))


def _example(path: Path) -> str:
    """A page of an example: its docstring, and the program below it."""
    source = path.read_text()
    docstring = ast.get_docstring(ast.parse(source)) or ""
    return f"# {path.name}\n\n{docstring}\n\n```python\n{source}```\n"


def _reference(package: str) -> str:
    return f"{package or 'tritondt'}.md"


def _described(package: str) -> str:
    """A page of a public package: its docstring, and every public name by what its docstring says."""
    name = f"tritondt.{package}" if package else "tritondt"
    path = ROOT / "tritondt" / package
    tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())
    places = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    parts = [f"# {name}", f"::: {name}\n    options: {{members: false, show_root_heading: false}}"]
    for public in _all(tree):
        place = places.get(public, f"{name}.{public}")
        # The folder kernels/ is imported as tritondt.kernels, by a link that those who read sources do not follow.
        place = place.replace("tritondt.kernels.", "kernels.")
        if place.startswith("torch."):
            parts.append(f"## {public}\n\nPyTorch's `{place}`.")
        elif place.rpartition(".")[2] != public:
            parts.append(f"## {public}\n\nAnother name of `{place}`.")
        else:
            parts.append(f"::: {place}")
    return "\n\n".join(parts) + "\n"


def _all(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return sorted(ast.literal_eval(node.value), key=str.lower)
    raise PluginError("a public package has no __all__")
