"""The hash of the code that computes a trial.

In the module of the experiment, the hash covers `trial` and every definition that it uses, directly or indirectly. It
also covers what this code imports, transitively, including relative imports, star imports and files in the same folder:
whole modules, and of the modules of lazyscope the definitions that are used and all statements that run for their
effect. The standard library and installed packages are excluded, except lazyscope and the package of the experiment. If
the trial is not a plain function, its data are included: the text of a lambda, the arguments of a `functools.partial`,
the variables of a closure, the state of an object. The release of PyTorch is included, because another release may
compute different numbers. Comments, docstrings, layout, `figure`, `claims` and `grid` are excluded
(the values of the grid are part of the key of the trial), and so are the lab and checkpoints, which only transport
results, and the statements of lazyscope that only check arguments, which raise an error or do nothing.

The hash does not cover data that a trial reads. They are part of the key of the trial if the experiment declares them
(`Experiment.files`, `Experiment.variables`, `Experiment.data`). Changes of a module that is imported by a
computed name, or of undeclared data, are not detected.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lazyscope.errors import ExperimentError
from lazyscope.lab.definitions import ALL, Use, is_own, read, uses
from lazyscope.lab.experiment import Experiment
from lazyscope.lab.sources import bound, counts, file_of, place_of, reached, tree, written


def fingerprint(experiment: Experiment) -> str:
    """Compute a hash of the code of an experiment's trials, which changes if their results may change.

    Args:
        experiment: The experiment.

    Returns:
        Sixteen hexadecimal digits.
    """
    return code_behind(experiment.trial, experiment.name).fingerprint


def source_hash(experiment: Experiment) -> str:
    """Compute a hash of the code of an experiment's trials, whatever the release of torch.

    A record keeps it, so that a record of other code than the present one can be marked.

    Args:
        experiment: The experiment.

    Returns:
        Sixteen hexadecimal digits.
    """
    return code_behind(experiment.trial, experiment.name).source


def drawing_code(experiment: Experiment) -> Code:
    """Compute a hash of the code that draws the figure and checks the claims.

    It covers the code of `figure` and `claims`, and every file of lazyscope, including the lab.

    Args:
        experiment: The experiment.

    Returns:
        The hash and the files.
    """
    files: dict[str, Path] = {}
    texts: list[str] = []
    for part in (experiment.figure, experiment.claims):
        code = code_behind(part, experiment.name)
        files |= code.files
        texts.append(code.fingerprint)  # the data of a closure or a partial are not in a file
    package = Path(__file__).parents[1]
    for path in package.rglob("*.py"):
        inside = path.relative_to(package.parent).with_suffix("").parts
        files[".".join(inside).removesuffix(".__init__")] = path
    texts += [f"{name} {hashlib.sha256(files[name].read_bytes()).hexdigest()}" for name in sorted(files)]
    return Code(_hash(texts), files)


@dataclass(frozen=True)
class Code:
    """The code that a function depends on.

    Args:
        fingerprint: The hash of the code, sixteen hexadecimal digits.
        files: The file of each module that is part of the hash, by the name of the module.
        source: The hash of the code alone, without the release of torch.
        definitions: The names that are part of the hash, for each module but those of the function itself.
    """

    fingerprint: str
    files: dict[str, Path]
    source: str = ""
    definitions: dict[str, frozenset[str]] = field(default_factory=dict)


def code_behind(function: Callable[..., object], experiment: str) -> Code:
    """Compute a hash of the code, as it is on the disk, that a function depends on.

    Args:
        function: A function, lambda, method, `functools.partial` or callable object, such as the trial.
        experiment: The name of the experiment, for error messages.

    Returns:
        The hash and the files.

    Raises:
        ExperimentError: If the code cannot be hashed, such as a function defined at the prompt or an open file in a
            closure.
    """
    try:
        return _Behind(experiment, function).code()
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise ExperimentError(f"The code of '{experiment}' cannot be read ({error}); check its files.") from error


def _hash(texts: list[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode("utf-8", "backslashreplace")).hexdigest()[:16]


class _Behind:
    """Collects everything that a function depends on. Each object is visited once, so cycles are allowed."""

    def __init__(self, experiment: str, function: Callable[..., object]) -> None:
        self._experiment = experiment
        self._texts: list[str] = []
        self._packages = {"lazyscope", _module_of(function).partition(".")[0]}
        self._own: dict[str, bool] = {}
        self._entered: dict[int, object] = {}  # keeps the objects alive, so that their ids stay unique
        self._files: dict[str, Path] = {}
        self._roots: dict[str, set[str]] = {}
        self._lambdas: dict[str, set[int]] = {}
        self._modules: set[str] = set()
        self._enter(function)

    def code(self) -> Code:
        """Compute the hash of the visited objects, the statements that they use, and the modules that these import."""
        texts, modules, definitions = list(self._texts), dict[str, str](), dict[str, frozenset[str]]()
        needed: dict[str, set[str]] = {}
        waiting: set[str] = set()

        def need(found: Iterable[Use]) -> None:
            for name, item in found:
                if name not in needed or item not in needed[name]:
                    needed.setdefault(name, set()).add(item)
                    waiting.add(name)

        need((name, ALL) for name in self._modules)
        for module in sorted(self._roots.keys() | self._lambdas.keys()):
            statements, beside = self._statements(module)
            texts += [written(node) for node in (*beside, *statements)]
            need(uses((*statements, *beside), self._package(module)))
        while waiting:
            name = waiting.pop()
            if not self._counts(name) or (path := file_of(name)) is None:
                continue
            text = read(path, name, needed[name])
            modules[name], self._files[name], definitions[name] = text.code, path, text.names
            need(text.uses)
        for name in {parent for module in (*modules, *self._files) for parent in _around(module)} - modules.keys():
            if (path := file_of(name)) is not None:
                modules[name], self._files[name] = read(path, name).code, path
        texts += [f"{name}\n{modules[name]}" for name in sorted(modules) if modules[name]]
        release = f"torch {re.split(r'[+]', torch.__version__)[0]}"
        return Code(_hash([release, *texts]), self._files, _hash(texts), definitions)

    def _statements(self, module: str) -> tuple[list[ast.stmt], list[ast.AST]]:
        """Return the statements of a module that the visited functions use, and the visited lambdas of the module."""
        path = self._files[module]
        parsed = tree(path.read_text(encoding="utf-8"), checks=not is_own(module))
        lines = self._lambdas.get(module, set())
        nodes = ast.walk(parsed) if lines else ()
        lambdas: list[ast.AST] = [node for node in nodes if isinstance(node, ast.Lambda) and node.lineno in lines]
        if lines - {getattr(node, "lineno", 0) for node in lambdas}:
            raise ExperimentError(
                f"A lambda of '{self._experiment}' is no longer where it was in {path}; run the command again."
            )
        roots = self._roots.get(module, set())
        if roots - {name for statement in parsed.body for name in bound(statement)}:
            return parsed.body, lambdas  # it was created dynamically, so any statement may matter
        return reached(parsed, roots, lambdas), lambdas

    def _package(self, module: str) -> str:
        loaded = getattr(sys.modules.get(module), "__package__", None)
        if loaded is not None:
            return str(loaded)
        return module if self._files[module].stem == "__init__" else module.rpartition(".")[0]

    def _counts(self, module: str) -> bool:
        """Return whether a module is part of the hash. Installed packages are excluded by their top-level name."""
        top = module.partition(".")[0]
        if top not in self._own:
            self._own[top] = top in self._packages or counts(top, place_of(top), self._packages)
        return self._own[top] and counts(module, None, self._packages | {top})

    def _enter(self, value: object) -> None:
        """Add a value to the hash: a number by its value, a function by its code, an object by its class and state."""
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
        elif hasattr(value, "__wrapped__"):  # as functools.cache returns it
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
        """Add any other object, by the state that pickle would store."""
        try:
            kept: Any = value.__reduce_ex__(4)
        except Exception as error:
            raise ExperimentError(
                f"'{self._experiment}' depends on a {type(value).__name__}, which cannot be hashed ({error}); its"
                " functions may contain numbers, strings, arrays and other functions."
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
        if around is not None:  # a decorator is part of the text of the function that it decorates
            self._enter(around)

    def _enter_class(self, kind: type) -> None:
        self._texts.append(f"{kind.__module__}.{kind.__qualname__}")
        file = getattr(sys.modules.get(kind.__module__), "__file__", None)
        if file is None or not self._counts_as(kind.__module__, Path(file)):
            return
        self._find(kind.__module__, Path(file), kind.__qualname__, 0)
        if "<locals>" in kind.__qualname__:
            parts = [part for part in vars(kind).values() if isinstance(part, FunctionType)]
            self._enter_all(*(part for part in parts if _file(part.__code__) is not None))  # dataclasses generate some

    def _counts_as(self, module: str, file: Path) -> bool:
        return module == "__main__" or counts(module, file, self._packages)

    def _find(self, module: str, file: Path, qualname: str, line: int) -> None:
        """Add a definition of a module by its name, or a lambda outside all definitions by its line."""
        self._files[module] = file
        root = qualname.partition(".")[0]
        if root == "<lambda>":
            self._lambdas.setdefault(module, set()).add(line)
        else:
            self._roots.setdefault(module, set()).add(root)


def _module_of(function: object) -> str:
    """Return the module that defines a function, looking through decorators and partials."""
    while isinstance(function, partial | MethodType):
        function = function.func if isinstance(function, partial) else function.__func__
    while (around := getattr(function, "__wrapped__", None)) is not None:
        function = around
    if isinstance(function, FunctionType):
        return str(function.__globals__.get("__name__", ""))
    return str(getattr(function, "__module__", None) or type(function).__module__)


def _around(module: str) -> list[str]:
    """Return the parent packages of a module, whose files run first. Those of lazyscope only export names."""
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
