"""The hash of the code that computes a trial.

It covers, in the experiment's own module, `trial` and every definition that it reaches by name, and the whole of every
module that those import, transitively, relative, star and sibling imports included; Python's own and installed packages
do not count, except lazyscope and the experiment's own package. Where the trial is not a plain function, what it holds
counts as well: a lambda's text, the arguments of a `functools.partial`, the variables of a closure, the state of an
object. Torch's release counts, since another one may compute other numbers. Comments, docstrings, layout, `figure`,
`claims` and `grid` do not count (the grid's values are in the trial's key already), nor does the lab, which moves
results and never makes them.

Code cannot see what a trial reads elsewhere. Files and environment variables count if the experiment declares them
(`Experiment.files`, `Experiment.variables`); a module that is imported by a computed name, or data that are read
undeclared, are the author's own responsibility.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lazyscope.errors import ExperimentError
from lazyscope.lab.experiment import Experiment
from lazyscope.lab.sources import bound, counts, file_of, imports, place_of, reached, read, tree


def fingerprint(experiment: Experiment) -> str:
    """A short hash that changes when what the trials compute may have changed.

    Args:
        experiment: Whose trials.

    Returns:
        Sixteen hexadecimal digits.
    """
    return code_behind(experiment.trial, experiment.name).fingerprint


def drawing_code(experiment: Experiment) -> Code:
    """What draws and judges the trials: every file of lazyscope, the lab's with them, and what they import besides.

    Args:
        experiment: Whose figure and claims.

    Returns:
        The hash of all these files, and where they are.
    """
    files: dict[str, Path] = {}
    texts: list[str] = []
    for part in (experiment.figure, experiment.claims):
        code = code_behind(part, experiment.name)
        files |= code.files
        texts.append(code.fingerprint)  # what a closure or a partial holds is in no file
    package = Path(__file__).parents[1]
    for path in package.rglob("*.py"):
        inside = path.relative_to(package.parent).with_suffix("").parts
        files[".".join(inside).removesuffix(".__init__")] = path
    texts += [f"{name} {hashlib.sha256(files[name].read_bytes()).hexdigest()}" for name in sorted(files)]
    return Code(_hash(texts), files)


@dataclass(frozen=True)
class Code:
    """The code behind a function: its hash, and the file of every module that counts in it."""

    fingerprint: str
    files: dict[str, Path]


def code_behind(function: Callable[..., object], experiment: str) -> Code:
    """What a function of this experiment, such as its trial, computes, as it stands on the disk.

    Args:
        function: A function, lambda, method, `functools.partial` or object that can be called.
        experiment: The name of the experiment, for what is refused.

    Returns:
        The hash and the files. What cannot be hashed, such as a function typed at a prompt or an open file in a
        closure, is refused with an `ExperimentError`.
    """
    try:
        return _Behind(experiment, function).code()
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise ExperimentError(f"The code of '{experiment}' cannot be read ({error}); check its files.") from error


def _hash(texts: list[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode("utf-8", "backslashreplace")).hexdigest()[:16]


class _Behind:
    """All that is found behind a function; objects are entered once, so they may refer to each other."""

    def __init__(self, experiment: str, function: Callable[..., object]) -> None:
        self._experiment = experiment
        self._texts = [f"torch {re.split(r'[+]', torch.__version__)[0]}"]
        self._packages = {"lazyscope", _module_of(function).partition(".")[0]}
        self._own: dict[str, bool] = {}
        self._entered: dict[int, object] = {}  # the objects as well, lest another one gets the same id
        self._files: dict[str, Path] = {}
        self._roots: dict[str, set[str]] = {}
        self._lambdas: dict[str, set[int]] = {}
        self._modules: set[str] = set()
        self._enter(function)

    def code(self) -> Code:
        """The hash over what was entered, the statements it reaches, and the modules these import."""
        texts, modules = list(self._texts), dict[str, str]()
        waiting = set(self._modules)
        for module in sorted(self._roots.keys() | self._lambdas.keys()):
            statements, beside = self._statements(module)
            texts += [ast.unparse(node) for node in (*beside, *statements)]
            waiting |= imports((*statements, *beside), self._package(module))
        while waiting:
            name = waiting.pop()
            if name in modules or not self._counts(name) or (path := file_of(name)) is None:
                continue
            text = read(path, name)
            modules[name], self._files[name] = text.code, path
            waiting |= text.imports
        for name in {parent for module in (*modules, *self._files) for parent in _around(module)} - modules.keys():
            if (path := file_of(name)) is not None:
                modules[name], self._files[name] = read(path, name).code, path
        return Code(_hash(texts + [f"{name}\n{modules[name]}" for name in sorted(modules)]), self._files)

    def _statements(self, module: str) -> tuple[list[ast.stmt], list[ast.AST]]:
        """What the functions of one module reach in it, and its lambdas that were entered."""
        path = self._files[module]
        parsed = tree(path.read_text(encoding="utf-8"))
        lines = self._lambdas.get(module, set())
        nodes = ast.walk(parsed) if lines else ()
        lambdas: list[ast.AST] = [node for node in nodes if isinstance(node, ast.Lambda) and node.lineno in lines]
        if lines - {getattr(node, "lineno", 0) for node in lambdas}:
            raise ExperimentError(
                f"A lambda of '{self._experiment}' is no longer where it was in {path}; run the command again."
            )
        roots = self._roots.get(module, set())
        if roots - {name for statement in parsed.body for name in bound(statement)}:
            return parsed.body, lambdas  # a class or function that was made, not written: anything may have made it
        return reached(parsed, roots, lambdas), lambdas

    def _package(self, module: str) -> str:
        loaded = getattr(sys.modules.get(module), "__package__", None)
        if loaded is not None:
            return str(loaded)
        return module if self._files[module].stem == "__init__" else module.rpartition(".")[0]

    def _counts(self, module: str) -> bool:
        """By its top-level package: of an installed one nothing is looked at."""
        top = module.partition(".")[0]
        if top not in self._own:
            self._own[top] = top in self._packages or counts(top, place_of(top), self._packages)
        return self._own[top] and counts(module, None, self._packages | {top})

    def _enter(self, value: object) -> None:
        """Take a value into the hash: a number by itself, a function by its code, an object by its class and state."""
        if isinstance(value, str | bytes | int | float | complex | torch.dtype | torch.device | Path | None):
            self._texts.append(f"{type(value).__name__} {value!r}")
            return
        if id(value) in self._entered:
            self._texts.append(f"again {list(self._entered).index(id(value))}")
            return
        self._entered[id(value)] = value
        self._texts.append(type(value).__qualname__)
        if isinstance(value, partial):
            self._enter_all(value.func, value.args, value.keywords)
        elif isinstance(value, MethodType):
            self._enter_all(value.__func__, value.__self__)
        elif isinstance(value, FunctionType):
            self._enter_function(value)
        elif isinstance(value, type):
            self._enter_class(value)
        elif isinstance(value, ModuleType):
            self._texts.append(value.__name__)
            self._modules.add(value.__name__)
        elif isinstance(value, Tensor):
            self._enter_array(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy(), value.dtype)
            self._enter(tuple(value.shape))
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
            self._enter_array(np.ascontiguousarray(value), (value.dtype.str, value.shape))
        elif isinstance(value, dict):
            self._enter_all(*(part for item in value.items() for part in item))
        elif isinstance(value, list | tuple):
            self._enter_all(*value)
        elif isinstance(value, set | frozenset):
            self._enter_all(*sorted(value, key=repr))
        elif isinstance(value, BuiltinFunctionType | np.ufunc):
            self._texts.append(str(getattr(value, "__qualname__", value)))
            if not isinstance(getattr(value, "__self__", None), ModuleType | None):
                self._enter(getattr(value, "__self__", None))
        elif hasattr(value, "__wrapped__"):  # as functools.cache leaves it
            self._enter(value.__wrapped__)
        else:
            self._enter_object(value)

    def _enter_all(self, *values: object) -> None:
        self._texts.append(str(len(values)))
        for value in values:
            self._enter(value)

    def _enter_array(self, content: np.ndarray, kind: object) -> None:
        self._texts.append(f"{kind} {hashlib.sha256(content.data).hexdigest()}")

    def _enter_object(self, value: object) -> None:
        """Any other object, by what pickle would keep of it."""
        try:
            kept: Any = value.__reduce_ex__(4)
        except Exception as error:
            raise ExperimentError(
                f"'{self._experiment}' depends on a {type(value).__name__}, which cannot be hashed ({error}); let its"
                " functions hold numbers, strings, arrays and other functions."
            ) from error
        if isinstance(kept, str):
            self._texts.append(kept)
        else:
            self._enter_all(*(part if i < 3 or part is None else list(part) for i, part in enumerate(kept[:5])))

    def _enter_function(self, function: FunctionType) -> None:
        code, module = function.__code__, str(function.__globals__.get("__name__", ""))
        held = [_content(cell) for cell in function.__closure__ or ()]
        around: object = getattr(function, "__wrapped__", None)
        file = _file(code)
        own = file is not None and self._counts_as(module, file)
        if own and file is not None:
            self._texts.append(code.co_qualname)
            self._find(module, file, code.co_qualname, code.co_firstlineno)
        elif around is None:
            self._texts.append(f"{module}.{code.co_qualname}")
            if file is None and module.partition(".")[0] in self._packages:
                raise ExperimentError(
                    f"'{self._experiment}' has a function without a source file; define it in a module."
                )
        if own or around is None:
            self._enter_all(held, list(function.__defaults__ or ()), function.__kwdefaults__ or {})
        if around is not None:  # a decorator stands in the text of what it decorates
            self._enter(around)

    def _enter_class(self, kind: type) -> None:
        self._texts.append(f"{kind.__module__}.{kind.__qualname__}")
        file = getattr(sys.modules.get(kind.__module__), "__file__", None)
        if file is None or not self._counts_as(kind.__module__, Path(file)):
            return
        self._find(kind.__module__, Path(file), kind.__qualname__, 0)
        if "<locals>" in kind.__qualname__:
            parts = [part for part in vars(kind).values() if isinstance(part, FunctionType)]
            self._enter_all(*(part for part in parts if _file(part.__code__) is not None))  # dataclasses write some

    def _counts_as(self, module: str, file: Path) -> bool:
        return module == "__main__" or counts(module, file, self._packages)

    def _find(self, module: str, file: Path, qualname: str, line: int) -> None:
        """Start from this name in its module; a lambda that no definition contains is known by its line."""
        self._files[module] = file
        root = qualname.partition(".")[0]
        if root == "<lambda>":
            self._lambdas.setdefault(module, set()).add(line)
        else:
            self._roots.setdefault(module, set()).add(root)


def _module_of(function: object) -> str:
    """The module in which the code behind a function runs; decorators and `wraps` say otherwise."""
    while isinstance(function, partial | MethodType):
        function = function.func if isinstance(function, partial) else function.__func__
    while (around := getattr(function, "__wrapped__", None)) is not None:
        function = around
    if isinstance(function, FunctionType):
        return str(function.__globals__.get("__name__", ""))
    return str(getattr(function, "__module__", None) or type(function).__module__)


def _around(module: str) -> list[str]:
    """The packages around a module, whose own files run first; those of lazyscope only gather names."""
    parts = module.split(".")
    return [] if parts[0] == "lazyscope" else [".".join(parts[:i]) for i in range(1, len(parts))]


def _file(code: CodeType) -> Path | None:
    name = inspect.getsourcefile(code)
    return Path(name) if name is not None and Path(name).is_file() else None


def _content(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return "empty"
