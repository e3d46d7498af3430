"""The hash of the code that computes a trial.

It covers, in the experiment's own module, `trial` and every definition it reaches by name, and whole every
module of lazyscope (or of the experiment's own package) that those import, transitively. Comments, docstrings,
layout, `figure`, `claims` and `grid` do not count (the grid's values are in the trial's key already), nor does
the lab, which moves results and never makes them.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from lazyscope.errors import ExperimentError
from lazyscope.lab.experiment import Experiment

_LAB = "lazyscope.lab"
_VIEWS = {"figure", "claims", "grid", "EXPERIMENT"}
"""What never counts in another experiment's module, from which `trial` may take a function."""


def fingerprint(experiment: Experiment) -> str:
    """A short hash that changes when, and only when, what the trials compute may have changed."""
    return code_behind(experiment.trial, experiment.name).fingerprint


def drawing_code(experiment: Experiment) -> Code:
    """What draws and judges the trials: every file of lazyscope, the lab's with them, and what they import besides."""
    files: dict[str, Path] = {}
    for part in (experiment.figure, experiment.claims):
        files |= code_behind(part, experiment.name).files
    package = Path(__file__).parents[1]
    for path in package.rglob("*.py"):
        inside = path.relative_to(package.parent).with_suffix("").parts
        files[".".join(inside).removesuffix(".__init__")] = path
    texts = [f"{name}\n{files[name].read_text(encoding='utf-8')}" for name in sorted(files)]
    return Code(_hash(texts), files)


@dataclass(frozen=True)
class Code:
    """The code behind a function: its hash, and the file of every module that counts in it."""

    fingerprint: str
    files: dict[str, Path]


def code_behind(function: Callable[..., object], experiment: str) -> Code:
    """What a function of this experiment, such as its trial, computes, as it stands on the disk."""
    while isinstance(function, partial):
        function = function.func
    file = inspect.getsourcefile(function)
    if file is None:
        raise ExperimentError(f"'{experiment}' has a function without a source file; define it in a module.")
    own = _reached(_tree(Path(file).read_text(encoding="utf-8")), function.__name__)
    modules: dict[str, str] = {}
    files = {function.__module__: Path(file)}
    packages = {"lazyscope", function.__module__.partition(".")[0]}
    waiting = _chosen(_imports(own), packages)
    while waiting:
        name = waiting.pop()
        path = _path(name)
        if name in modules or path is None:
            continue
        text = _text(path.read_text(encoding="utf-8"))
        modules[name], files[name] = text.code, path
        waiting |= _chosen(text.imports, packages)
    texts = [ast.unparse(node) for node in own] + [f"{name}\n{modules[name]}" for name in sorted(modules)]
    return Code(_hash(texts), files)


def _hash(texts: list[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def _reached(tree: ast.Module, root: str) -> list[ast.stmt]:
    """The top-level statements that `root` reaches by name; those that bind nothing always count."""
    bound = [(statement, _bound(statement)) for statement in tree.body]
    names, size = {root}, 0
    while len(names) > size:
        size = len(names)
        for statement, binds in bound:
            if binds & names:
                names |= {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
    return [statement for statement, binds in bound if not binds or binds & names]


def _bound(statement: ast.stmt) -> set[str]:
    """The names that a top-level statement defines."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.partition(".")[0] for alias in statement.names}
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        return {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return set()


@dataclass(frozen=True)
class _Text:
    """What a module says, and all that it imports."""

    code: str
    imports: frozenset[str]


@cache  # twenty experiments stand on the same hundred modules
def _text(source: str) -> _Text:
    """A module of the code."""
    tree = _tree(source)
    if any("EXPERIMENT" in _bound(statement) for statement in tree.body):
        tree.body = [statement for statement in tree.body if not _bound(statement) & _VIEWS]
    return _Text(ast.unparse(tree), _imports([tree]))


def _imports(nodes: Iterable[ast.AST]) -> frozenset[str]:
    """The names of modules imported here; `from m import n` may name a module m.n.

    Relative imports are not followed: lazyscope has none.
    """
    found: set[str] = set()
    for node in (inner for outer in nodes for inner in ast.walk(outer)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found)


def _chosen(names: Iterable[str], packages: set[str]) -> set[str]:
    """Those of these packages, less the lab."""
    return {name for name in names if name.partition(".")[0] in packages and not f"{name}.".startswith(f"{_LAB}.")}


def _path(module: str) -> Path | None:
    """The module's file; None where the name is not a module but something inside one."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return None
    return Path(spec.origin) if spec is not None and spec.origin is not None else None


def _tree(source: str) -> ast.Module:
    """The syntax tree without docstrings; comments and layout are gone already."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [s for s in node.body if not _is_text(s)] or [ast.Pass()]
    tree.body = [single for statement in tree.body for single in _split(statement)]
    return tree


def _split(statement: ast.stmt) -> list[ast.stmt]:
    """An import of several names as several imports: each counts only where its own name is reached."""
    if isinstance(statement, ast.Import):
        return [ast.Import([alias]) for alias in statement.names]
    if isinstance(statement, ast.ImportFrom):
        return [ast.ImportFrom(statement.module, [alias], statement.level) for alias in statement.names]
    return [statement]


def _is_text(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )
