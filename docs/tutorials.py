"""Run every tutorial when the site is built, and turn it into a page with its printed output and figures.

A tutorial is a script divided into cells, `# %%` for code and `# %% [markdown]` for text, a format that editors and
Jupyter can read.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import re
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from matplotlib.figure import Figure
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

TUTORIALS = Path(__file__).resolve().parent.parent / "tutorials"
COLAB = "https://colab.research.google.com/github/lazyscope/lazyscope/blob/gh-pages/tutorials"
"""The notebooks of the published site, in the branch that GitHub serves."""


def on_files(files: Files, *, config: MkDocsConfig, **_: Any) -> Files:
    """Add the pages and pictures of the tutorials. MkDocs calls this once."""
    for path in sorted(TUTORIALS.glob("*.py")):
        text, pictures = page(path)
        files.append(File.generated(config, f"tutorials/{path.stem}.md", content=text))
        files.append(
            File.generated(config, f"tutorials/{path.stem}.ipynb", content=json.dumps(notebook(path), indent=1))
        )
        for name, content in pictures.items():
            files.append(File.generated(config, f"tutorials/{name}", content=content))
    return files


def page(path: Path) -> tuple[str, dict[str, bytes]]:
    """Return the tutorial as Markdown, and its pictures by name."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):  # for the files that a tutorial writes
        return _page(path)


def _page(path: Path) -> tuple[str, dict[str, bytes]]:
    module = _module(path)
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    seen: set[int] = set()
    try:
        for line, kind, source in cells(path.read_text(encoding="utf-8")):
            if kind == "markdown":
                parts.append(_text(source))
                continue
            parts.append(f"```python\n{source.strip()}\n```")
            printed = _run(source, line, path, module)
            if printed.strip():
                parts.append(f"``` {{ .text .no-copy }}\n{printed.rstrip()}\n```")
            drawn = [value for value in vars(module).values() if isinstance(value, Figure) and id(value) not in seen]
            for figure in drawn:
                seen.add(id(figure))
                name = f"{path.stem}-{len(pictures) + 1}.png"
                pictures[name] = _png(figure)
                parts.append(f"![The figure that the code above draws]({name})")
    finally:
        del sys.modules[module.__name__]
    parts.insert(1, f"[Download as a notebook]({path.stem}.ipynb) · [Open in Colab]({COLAB}/{path.stem}.ipynb)")
    source_line = f"<small>This page is `tutorials/{path.name}`, run when the site was built.</small>"
    return "\n\n".join([*parts, source_line]) + "\n", pictures


def notebook(path: Path) -> dict[str, Any]:
    """Return the tutorial as a Jupyter notebook without outputs, in version 4.5 of its format.

    The first cell installs lazyscope. The others are the cells that `page` runs.
    """
    found = [_cell("install", "code", '%pip install --quiet "lazyscope[all]"')]
    for i, (_, kind, source) in enumerate(cells(path.read_text(encoding="utf-8"))):
        text = _text(source) if kind == "markdown" else source.strip()
        found.append(_cell(f"cell-{i}", kind, text))
    names = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return {"nbformat": 4, "nbformat_minor": 5, "metadata": names, "cells": found}


def _cell(name: str, kind: str, text: str) -> dict[str, Any]:
    cell = {"cell_type": kind, "id": name, "metadata": {}, "source": text.splitlines(keepends=True)}
    return {**cell, "execution_count": None, "outputs": []} if kind == "code" else cell


def _text(source: str) -> str:
    return "\n".join(row.removeprefix("#").removeprefix(" ") for row in source.splitlines()).strip()


def cells(text: str) -> list[tuple[int, str, str]]:
    """Return (number of the line before it, "markdown" or "code", source) for each cell."""
    marks = list(re.finditer(r"^# %%( \[markdown\])?\n", text, re.M))
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    return [
        (text[: mark.end()].count("\n"), "markdown" if mark[1] else "code", text[mark.end() : end])
        for mark, end in zip(marks, ends, strict=True)
    ]


def _module(path: Path) -> ModuleType:
    """Return an empty module, registered in `sys.modules` so that a tutorial's functions can be found by name."""
    spec = importlib.util.spec_from_file_location(f"tutorial_{path.stem}", path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    return module


def _run(source: str, line: int, path: Path, module: ModuleType) -> str:
    printed = io.StringIO()
    code = compile("\n" * line + source, str(path), "exec")  # keeps line numbers for errors and `inspect`
    with contextlib.redirect_stdout(printed):
        exec(code, vars(module))
    return printed.getvalue()


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()
