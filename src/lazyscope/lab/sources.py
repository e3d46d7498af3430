"""The source code of Python modules: which modules belong to an experiment, and their statements."""

from __future__ import annotations

import ast
import importlib.util
import sys
import sysconfig
from collections.abc import Iterable
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

_TRANSPORT = ("lazyscope.lab", "lazyscope.flow.checkpoint")
"""The lab and checkpoints are excluded from the hash of a trial, because they only transport results."""

_INSTALLED = {"site-packages", "dist-packages"}
_STANDARD = tuple({Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "platstdlib")})
_OMITTED = {"ctx", "kind", "type_comment", "type_ignores"}
"""Fields of syntax trees that do not change what the code does."""


def counts(module: str, path: Path | None, packages: set[str]) -> bool:
    """Decide whether a module is part of the hash, rather than of the standard library or an installed package.

    Args:
        module: The full name of the module.
        path: The file of the module, or None if it is unknown.
        packages: The top-level packages that are included wherever they are installed.

    Returns:
        True for the modules of `packages`, except the lab and checkpoints, and for every other module that is neither
        part of the standard library nor installed in site-packages, such as a file beside the experiment.
    """
    top = module.partition(".")[0]
    if top == "torch" or any(f"{module}.".startswith(f"{each}.") for each in _TRANSPORT):
        return False  # the release of torch is part of the hash
    if top in packages:
        return True
    return path is not None and not _INSTALLED & set(path.parts) and not _is_standard(path)


@cache
def _is_standard(path: Path) -> bool:
    return any(path.resolve().is_relative_to(folder) for folder in _STANDARD)


def file_of(module: str) -> Path | None:
    """Find the file of a module.

    This does not import anything, unlike `importlib.util.find_spec`, which imports the parent packages of a module.

    Args:
        module: The full name of the module.

    Returns:
        The path of the file, or None if the name is not a module or the module has no file.
    """
    found = _spec(module)
    if found is None or found.origin is None:
        return None
    path = Path(found.origin)
    return path if path.is_file() else None


def place_of(module: str) -> Path | None:
    """Find the file of a module, or the folder of a namespace package.

    Args:
        module: The full name of the module.

    Returns:
        The path, or None for built-in modules and for names that are not modules.
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


def written(part: object) -> str:
    """Write a syntax tree as text that is the same in all releases of Python, unlike `ast.unparse` and `ast.dump`.

    Args:
        part: The tree, or the value of one of its fields.

    Returns:
        The text.

    Example:
        >>> written(ast.parse("x = 1").body[0])
        "Assign(targets=[Name(id='x')], value=Constant(value=1))"
    """
    if isinstance(part, list):
        return f"[{', '.join(written(each) for each in part)}]"
    if isinstance(part, ast.JoinedStr):  # Python 3.12 adds empty strings to some
        return f"JoinedStr({written([each for each in part.values if getattr(each, 'value', None) != ''])})"
    if not isinstance(part, ast.AST):
        return repr(part)
    fields = [(name, value) for name, value in ast.iter_fields(part) if name not in _OMITTED]
    texts = [f"{name}={written(value)}" for name, value in fields if value is not None and value != []]
    return f"{type(part).__name__}({', '.join(texts)})"


@cache
def tree(source: str, *, checks: bool = True) -> ast.Module:
    """Parse a module and remove its docstrings. A syntax tree does not contain comments and layout.

    Args:
        source: The source code of the module.
        checks: Whether to keep checks of arguments, as `is_check` finds them.

    Returns:
        The tree, in which an import of several names is split into several imports. The tree is cached, so it must not
        be modified.
    """
    parsed = ast.parse(source)
    if not checks:
        parsed = _Unchecked().visit(parsed)
    for node in ast.walk(parsed):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [s for s in node.body if not _is_text(s)] or [ast.Pass()]
    parsed.body = [single for statement in parsed.body for single in _split(statement)]
    return parsed


def reached(parsed: ast.Module, roots: set[str], within: Iterable[ast.AST] = ()) -> list[ast.stmt]:
    """Find the top-level statements of a module that some definitions depend on.

    Args:
        parsed: The syntax tree of the module.
        roots: The names of the definitions.
        within: Further nodes, such as lambdas, whose names are used.

    Returns:
        The statements in their order. Statements that bind no name are always included, with the names that they use.
        So are star imports, because the names that they bind are unknown. A block for `__main__` is included without
        the names that it uses.
    """
    statements = [(statement, bound(statement)) for statement in parsed.body]
    names = roots | {name for node in within for name in named(node)}
    for statement, binds in statements:
        if not binds and not is_main(statement):
            names |= named(statement)
    size = 0
    while len(names) > size:
        size = len(names)
        for statement, binds in statements:
            if binds & names:
                names |= named(statement)
    return [statement for statement, binds in statements if not binds or "*" in binds or binds & names]


def bound(statement: ast.stmt) -> set[str]:
    """Find the names that a top-level statement defines, including those in its blocks.

    Names that are local to functions and classes are not included.

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


def named(node: ast.AST) -> set[str]:
    """Return the names that a part of a syntax tree mentions.

    Args:
        node: The part.

    Returns:
        The names, without those of attributes.
    """
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def is_main(statement: ast.stmt) -> bool:
    """Decide whether a statement is a block for `__main__`.

    Args:
        statement: Any statement.

    Returns:
        True if it is one.
    """
    return isinstance(statement, ast.If) and "__name__" in named(statement.test)


def is_check(statement: ast.stmt) -> bool:
    """Decide whether a statement of lazyscope only checks arguments.

    Args:
        statement: Any statement.

    Returns:
        True if it calls a function named `check_…` and drops what it returns. Such a function raises an error or does
        nothing, so it does not change the results of a trial that ends.
    """
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    called = statement.value.func
    return isinstance(called, ast.Name) and called.id.lstrip("_").startswith("check_")


class _Unchecked(ast.NodeTransformer):
    """Removes checks of arguments. A block that contains nothing else passes.

    A `try` is kept as it is, because an error of a check that it catches decides what is computed.
    """

    def visit_Try(self, node: ast.Try) -> ast.AST:
        return node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and any(isinstance(each, ast.stmt) and is_check(each) for each in block):
                setattr(node, name, [each for each in block if not is_check(each)] or [ast.Pass()])
        return node


def _split(statement: ast.stmt) -> list[ast.stmt]:
    """Split an import of several names, so that each name is included only if it is used."""
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
