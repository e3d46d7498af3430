"""Python modules as text: which of them are the experiment's own, what they say, and what they import."""

from __future__ import annotations

import ast
import importlib.util
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

LAB = "lazyscope.lab"
"""The lab does not count: it moves results and never makes them."""

_VIEWS = {"figure", "claims", "grid", "EXPERIMENT"}
"""What never counts in another experiment's module, from which `trial` may take a function."""

_INSTALLED = {"site-packages", "dist-packages"}
_STANDARD = tuple({Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "platstdlib")})
_IMPORTERS = {"import_module", "__import__", "resolve_name"}
"""Functions that import a module by its name; a name that is written out is followed."""


@dataclass(frozen=True)
class Text:
    """What a module says, and the names of all that it imports."""

    code: str
    imports: frozenset[str]


def counts(module: str, path: Path | None, packages: set[str]) -> bool:
    """Whether a module is part of the computation, rather than of Python or of an installed package.

    Args:
        module: The full name of the module.
        path: Its file.
        packages: Top-level packages that count wherever they are installed.

    Returns:
        True for the modules of `packages`, except the lab, and for every other module that is neither part of the
        standard library nor installed among the site packages, such as a sibling file.
    """
    top = module.partition(".")[0]
    if f"{module}.".startswith(f"{LAB}.") or top == "torch":  # torch's release is in the hash
        return False
    if top in packages:
        return True
    return path is not None and not _INSTALLED & set(path.parts) and not _is_standard(path)


@cache
def _is_standard(path: Path) -> bool:
    return any(path.resolve().is_relative_to(folder) for folder in _STANDARD)


def file_of(module: str) -> Path | None:
    """The file of a module; None where the name is something inside a module, or is not there.

    Nothing is imported for it, unlike with `importlib.util.find_spec`, which imports the packages around a module.

    Args:
        module: The full name of the module.

    Returns:
        The file, of which it is known that it exists.
    """
    found = _spec(module)
    if found is None or found.origin is None:
        return None
    path = Path(found.origin)
    return path if path.is_file() else None


def place_of(module: str) -> Path | None:
    """The file of a module, or the folder of a package that has no file of its own.

    Args:
        module: The full name of the module.

    Returns:
        The path, or None for built-in modules and names that are no modules.
    """
    if (path := file_of(module)) is not None:
        return path
    found = _spec(module)
    folders = found.submodule_search_locations if found is not None else None
    return Path(next(iter(folders))) if folders else None


def _spec(module: str) -> ModuleSpec | None:
    loaded = getattr(sys.modules.get(module), "__spec__", None)
    if isinstance(loaded, ModuleSpec):
        return loaded
    parent, _, _ = module.rpartition(".")
    try:
        if not parent:
            return importlib.util.find_spec(module)
        around = _spec(parent)
    except (ImportError, ValueError):
        return None
    if around is None or around.submodule_search_locations is None:
        return None
    return PathFinder.find_spec(module, list(around.submodule_search_locations))


def read(path: Path, module: str) -> Text:
    """A module of the code, less the views where it is an experiment.

    Args:
        path: Its file.
        module: Its full name, from which relative imports start.

    Returns:
        Its code without comments, docstrings and layout, and the names that it imports; an extension module has its
        bytes for code and imports nothing that can be seen.
    """
    if path.suffix not in (".py", ".pyw"):
        return Text(path.read_bytes().hex(), frozenset())
    package = module if path.stem == "__init__" else module.rpartition(".")[0]
    return _read(path.read_text(encoding="utf-8"), package)


@cache  # twenty experiments stand on the same hundred modules
def _read(source: str, package: str) -> Text:
    body = tree(source).body
    if any("EXPERIMENT" in bound(statement) for statement in body):
        body = [statement for statement in body if not bound(statement) & _VIEWS]
    return Text(ast.unparse(ast.Module(body, [])), imports(body, package))


def imports(nodes: Iterable[ast.AST], package: str) -> frozenset[str]:
    """The full names of the modules imported here; `from m import n` may name a module m.n.

    Args:
        nodes: Pieces of a module.
        package: The package of that module, from which relative imports start.

    Returns:
        The names, of which some may not be modules.
    """
    found: set[str] = set()
    inside = [inner for outer in nodes for inner in ast.walk(outer)]
    aliases = [alias for node in inside if isinstance(node, ast.ImportFrom) for alias in node.names]
    importers = _IMPORTERS | {alias.asname or alias.name for alias in aliases if alias.name in _IMPORTERS}
    for node in inside:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = _absolute("." * node.level + (node.module or ""), package)
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names if alias.name != "*")}
        elif isinstance(node, ast.Call) and _called(node) in importers and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                found.add(_absolute(name.value.partition(":")[0], package))
    return frozenset(found - {""})


def _called(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


def _absolute(name: str, package: str) -> str:
    try:
        return importlib.util.resolve_name(name, package)
    except ImportError:  # it leaves the package, so it could not be imported either
        return ""


@cache
def tree(source: str) -> ast.Module:
    """The syntax tree of a module without docstrings; comments and layout are gone already.

    Args:
        source: The text of the module.

    Returns:
        The tree, in which an import of several names is several imports. It is shared: do not change it.
    """
    parsed = ast.parse(source)
    for node in ast.walk(parsed):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [s for s in node.body if not _is_text(s)] or [ast.Pass()]
    parsed.body = [single for statement in parsed.body for single in _split(statement)]
    return parsed


def reached(parsed: ast.Module, roots: set[str], within: Iterable[ast.AST] = ()) -> list[ast.stmt]:
    """The top-level statements of a module that some names reach.

    Args:
        parsed: The module.
        roots: The names to start from.
        within: Further nodes, such as a lambda's, whose names are reached.

    Returns:
        The statements in their order. Those that bind no name always count, with what they name, and so do star
        imports, of which it cannot be seen what they bind; a block for `__main__` counts by itself alone.
    """
    statements = [(statement, bound(statement)) for statement in parsed.body]
    names = roots | {name for node in within for name in _named(node)}
    for statement, binds in statements:
        if not binds and not _is_main(statement):
            names |= _named(statement)
    size = 0
    while len(names) > size:
        size = len(names)
        for statement, binds in statements:
            if binds & names:
                names |= _named(statement)
    return [statement for statement, binds in statements if not binds or "*" in binds or binds & names]


def bound(statement: ast.stmt) -> set[str]:
    """The names that a top-level statement defines, in its blocks too, but not inside of functions and classes.

    Args:
        statement: Any statement.

    Returns:
        The names, with "*" for a star import.
    """
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.partition(".")[0] for alias in statement.names}
    names: set[str] = set()
    for child in ast.iter_child_nodes(statement):
        if isinstance(child, ast.stmt):
            names |= bound(child)
        elif isinstance(child, ast.ExceptHandler | ast.match_case):
            names |= {name for inner in child.body for name in bound(inner)}
        else:
            names |= {n.id for n in ast.walk(child) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return names


def _named(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def _is_main(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and "__name__" in _named(statement.test)


def _split(statement: ast.stmt) -> list[ast.stmt]:
    """An import of several names as several imports: each counts only where its own name is reached."""
    if isinstance(statement, ast.Import):
        return [ast.copy_location(ast.Import([alias]), statement) for alias in statement.names]
    if isinstance(statement, ast.ImportFrom):
        return [
            ast.copy_location(ast.ImportFrom(statement.module, [alias], statement.level), statement)
            for alias in statement.names
        ]
    return [statement]


def _is_text(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )
