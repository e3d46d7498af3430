"""The definitions of a module that others use, and what they use in other modules.

A function depends on some definitions of a module, not on all of them. For modules of lazyscope, the hash of a trial
covers these definitions, without their checks of arguments, and every statement of the module that runs for its effect,
such as one that adds a rule to a table. For modules of users, whose statements may have any effect, it covers the whole
module.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TypeAlias

from lazyscope.lab.sources import bound, file_of, is_main, named, tree, written

ALL, EFFECTS = "*", ""
"""In the place of the name of a definition: the whole module, or only its statements that run for their effect."""

Use: TypeAlias = tuple[str, str]
"""A module, and the name of one of its definitions, `ALL` or `EFFECTS`."""

_OWN = "lazyscope"
"""Modules of this package are covered by their definitions. Its packages only export names."""

_DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

_PLAIN = frozenset(
    "dataclass final overload cache lru_cache contextmanager runtime_checkable no_type_check no_grad singledispatch"
    " without_autocast full_precision jit".split()
)
"""Decorators without an effect on anything but the definition that they decorate."""

_VIEWS = {"figure", "claims", "grid", "EXPERIMENT"}
"""Definitions that are excluded when `trial` imports a function from the module of another experiment."""

_IMPORTERS = {"import_module", "__import__", "resolve_name"}
"""Functions that import a module by its name. They are followed if the name is a literal."""


@dataclass(frozen=True)
class Text:
    """The code of a module, or of some of its definitions.

    Args:
        code: The code without comments, docstrings and layout.
        uses: What it uses of other modules. Some modules may not exist, because `from m import n` may or may not name
            a module m.n.
        names: The names that it defines.
    """

    code: str
    uses: frozenset[Use]
    names: frozenset[str]

    @classmethod
    def of(cls, statements: Collection[_Statement]) -> Text:
        return cls(
            "\n".join(each.code for each in statements),
            frozenset().union(*(each.uses for each in statements)),
            frozenset().union(*(each.binds for each in statements)),
        )


@dataclass(frozen=True)
class _Statement:
    """A top-level statement of a module: its code, the names that it binds and uses, and what it imports.

    A definition is executed when it is called, and any other statement when the module is imported.
    """

    code: str
    binds: frozenset[str]
    names: frozenset[str]
    uses: frozenset[Use]
    acts: bool
    defines: bool


def read(path: Path, module: str, names: Iterable[str] = (ALL,)) -> Text:
    """Read the code of a module that some of its definitions depend on, and what this code uses of other modules.

    In the module of an experiment, `figure`, `claims`, `grid` and `EXPERIMENT` are omitted.

    Args:
        path: The file of the module.
        module: The full name of the module, which is needed to resolve relative imports.
        names: The names of the definitions. A name that the module does not define may be anything in it.

    Returns:
        The code without comments, docstrings and layout. For an extension module, it is its bytes, and what it uses is
        unknown.
    """
    if path.suffix not in (".py", ".pyw"):
        return Text(path.read_bytes().hex(), frozenset(), frozenset())
    exports = path.stem == "__init__"
    package = module if exports else module.rpartition(".")[0]
    statements = _statements(path.read_text(encoding="utf-8"), package)
    chosen = frozenset(names) - {EFFECTS}
    if exports and is_own(module):
        chosen -= {name for name in chosen if file_of(f"{module}.{name}") is not None}
    known = {name for statement in statements for name in statement.binds}
    if not is_own(module) or ALL in known | chosen or chosen - known:
        if any("EXPERIMENT" in statement.binds for statement in statements):
            statements = tuple(statement for statement in statements if not statement.binds & _VIEWS)
        return Text.of(statements)
    text = Text.of(_reached(statements, chosen))
    if exports:
        return text
    # A module executes all its imports, for whatever these modules add to tables elsewhere.
    others = {(other, EFFECTS) for each in statements if not each.defines for other, _ in each.uses}
    return replace(text, uses=text.uses | others)


def is_own(module: str) -> bool:
    """Decide whether a module belongs to lazyscope.

    Args:
        module: The full name of the module.

    Returns:
        True if it does.
    """
    return module.partition(".")[0] == _OWN


@cache  # forty experiments use the same modules
def _statements(source: str, package: str) -> tuple[_Statement, ...]:
    return tuple(
        _Statement(
            written(each),
            frozenset(bound(each)),
            frozenset() if is_main(each) else frozenset(named(each)),
            uses([each], package),
            _acts(each),
            isinstance(each, _DEFINITIONS),
        )
        for each in tree(source, checks=not is_own(package)).body
    )


def _acts(statement: ast.stmt) -> bool:
    """Whether a statement may have an effect on anything but the names that it binds.

    An unknown decorator may add to a table, and so may a loop at the top level. Imports and assignments to names may
    not.
    """
    if isinstance(statement, _DEFINITIONS):
        calls = [each.func if isinstance(each, ast.Call) else each for each in statement.decorator_list]
        return any(getattr(call, "attr", getattr(call, "id", "")) not in _PLAIN for call in calls)
    if isinstance(statement, ast.If) and "TYPE_CHECKING" in named(statement.test):
        return False
    plain = isinstance(statement, ast.Import | ast.ImportFrom | ast.Assign | ast.AnnAssign)
    return not (plain and bound(statement))


def _reached(statements: tuple[_Statement, ...], roots: frozenset[str]) -> list[_Statement]:
    """The statements that some definitions depend on, and all that act."""
    names = set(roots).union(*(each.names for each in statements if each.acts))
    kept = {i for i, each in enumerate(statements) if each.acts}
    size = -1
    while len(kept) > size:
        size = len(kept)
        for i, each in enumerate(statements):
            if i not in kept and each.binds & names:
                kept.add(i)
                names |= each.names
    return [statements[i] for i in sorted(kept)]


def uses(nodes: Iterable[ast.AST], package: str) -> frozenset[Use]:
    """Find what parts of a syntax tree use of other modules.

    Args:
        nodes: The parts of the syntax tree of a module.
        package: The package of that module, which is needed to resolve relative imports.

    Returns:
        The modules with the names that are imported from them. `import m` uses the whole module m.
    """
    found: set[Use] = set()
    inside = [inner for outer in nodes for inner in ast.walk(outer)]
    aliases = [alias for node in inside if isinstance(node, ast.ImportFrom) for alias in node.names]
    importers = _IMPORTERS | {alias.asname or alias.name for alias in aliases if alias.name in _IMPORTERS}
    for node in inside:
        if isinstance(node, ast.Import):
            found |= {(alias.name, ALL) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = _absolute("." * node.level + (node.module or ""), package)
            for alias in node.names:
                found.add((f"{base}.{alias.name}", ALL))
                found.add((base, alias.name if is_own(base) else ALL))
        elif isinstance(node, ast.Call) and _called(node) in importers and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                found.add((_absolute(name.value.partition(":")[0], package), ALL))
    return frozenset((module, name) for module, name in found if module)


def _called(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


def _absolute(name: str, package: str) -> str:
    try:
        return importlib.util.resolve_name(name, package)
    except ImportError:  # it leads outside the package, so the import would fail as well
        return ""
