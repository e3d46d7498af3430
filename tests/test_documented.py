"""Every callable that `lazyscope` or one of its packages exports documents its arguments, and all examples run."""

from __future__ import annotations

import doctest
import importlib
from collections.abc import Iterator
from pathlib import Path

import griffe
import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = griffe.load("lazyscope", search_paths=[str(ROOT / "src")], docstring_parser="google", resolve_aliases=True)
assert isinstance(PACKAGE, griffe.Module)
_OWN = ("__call__", "__init__")


def packages() -> Iterator[str]:
    """Yield the names of all packages and modules that define `__all__`."""
    for path in sorted((ROOT / "src/lazyscope").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
        if not name.endswith("__main__") and "__all__" in path.read_text():
            yield name


def exported(package: str) -> Iterator[griffe.Function | griffe.Class]:
    """Yield the functions and classes that a package exports."""
    module = importlib.import_module(package)
    for name in module.__all__:
        found = PACKAGE[f"{package}.{name}".removeprefix("lazyscope.")]
        found = found.final_target if found.is_alias else found
        if isinstance(found, griffe.Function | griffe.Class):
            yield found


def undocumented(target: griffe.Function | griffe.Class) -> Iterator[str]:
    """Yield the missing docstrings and parameter descriptions of a target and of its public methods."""
    if isinstance(target, griffe.Function):
        yield from _of_function(target, _described(target))
        return
    described = _described(target) | {
        name for name, member in target.members.items() if member.is_attribute and member.docstring is not None
    }
    if target.docstring is None:
        yield f"{target.path}: no docstring"
    for name, member in target.members.items():
        if not isinstance(member, griffe.Function) or (name.startswith("_") and name not in _OWN):
            continue
        if name == "__init__":
            yield from _of_function(member, described | _described(member), docstring=False)
        elif "overload" not in {str(each.value) for each in member.decorators}:
            yield from _of_function(member, _described(member))
    if "dataclass" in {str(each.value).partition("(")[0] for each in target.decorators}:
        fields = [
            name for name, each in target.members.items() if isinstance(each, griffe.Attribute) and each.annotation
        ]
        yield from (f"{target.path}: {name}" for name in fields if not name.startswith("_") and name not in described)


def _of_function(function: griffe.Function, described: set[str], docstring: bool = True) -> Iterator[str]:
    if docstring and function.docstring is None:
        if not any(function.name in base for base in _inherited(function)):
            yield f"{function.path}: no docstring"
        return
    names = [each.name.lstrip("*") for each in function.parameters if each.name not in ("self", "cls")]
    yield from (f"{function.path}: {name}" for name in names if not name.startswith("_") and name not in described)


def _inherited(function: griffe.Function) -> list[set[str]]:
    """Return the names that the base classes of a method's class document."""
    owner = function.parent
    bases = owner.mro() if isinstance(owner, griffe.Class) else []
    return [{name for name, member in base.members.items() if member.docstring is not None} for base in bases]


def _described(target: griffe.Function | griffe.Class) -> set[str]:
    if target.docstring is None:
        return set()
    sections = target.docstring.parse("google")
    wanted = (griffe.DocstringSectionKind.parameters, griffe.DocstringSectionKind.attributes)
    return {item.name.lstrip("*") for section in sections if section.kind in wanted for item in section.value}


@pytest.mark.parametrize("package", list(packages()))
def test_parameters_are_described(package: str) -> None:
    missing = [line for target in exported(package) for line in undocumented(target)]
    assert not missing, "\n".join(missing)


# ── examples ───────────────────────────────────────────────────────────────────────────────────────────────────────
def examples(target: griffe.Object) -> Iterator[griffe.Object]:
    """Yield the target and its members that are defined in it, if their docstrings contain examples."""
    if target.docstring is not None and ">>>" in target.docstring.value:
        yield target
    for member in target.members.values():
        if not isinstance(member, griffe.Alias) and not isinstance(member, griffe.Module):
            yield from examples(member)


def modules(package: griffe.Module) -> Iterator[griffe.Module]:
    """Yield a package and all modules in it."""
    yield package
    for module in package.modules.values():
        if isinstance(module, griffe.Module):
            yield from modules(module)


EXAMPLES = {module.path: found for module in modules(PACKAGE) if (found := list(examples(module)))}


def test_examples_are_found() -> None:
    assert "lazyscope.tangent.limit.limit_kernel" in [each.path for each in EXAMPLES["lazyscope.tangent.limit"]]
    assert sum(map(len, EXAMPLES.values())) > 100


@pytest.mark.parametrize("path", EXAMPLES)
def test_examples(path: str) -> None:
    """Run the docstrings of a module as `doctest` does, also those that a decorator hides from it."""
    module = importlib.import_module(path)
    runner, report = doctest.DocTestRunner(), list[str]()
    for target in EXAMPLES[path]:
        assert target.docstring is not None
        text, line = target.docstring.value, target.docstring.lineno
        test = doctest.DocTestParser().get_doctest(text, dict(vars(module)), target.path, str(target.filepath), line)
        runner.run(test, out=report.append)
    assert not runner.failures, "".join(report)
