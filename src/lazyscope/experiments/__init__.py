"""Every figure of the sources, one short file each.

A file of this folder that ends with `EXPERIMENT = Experiment(...)` is found by itself; nothing else lists it.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import sys
from pathlib import Path

from lazyscope.errors import ExperimentError
from lazyscope.lab.experiment import Experiment


def experiments() -> dict[str, Experiment]:
    """All experiments of this folder by name, in alphabetical order."""
    modules = [importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]
    found = [module.EXPERIMENT for module in modules if hasattr(module, "EXPERIMENT")]
    return {experiment.name: experiment for experiment in sorted(found, key=lambda e: e.name)}


def find(name: str) -> Experiment:
    """An experiment by name, or the user's own as `package.module:NAME`, seen from the current folder."""
    if ":" in name:
        return _load(name)
    known = experiments()
    if name in known:
        return known[name]
    close = difflib.get_close_matches(name, known, n=1)
    remedy = f"did you mean '{close[0]}'?" if close else f"there are {', '.join(known) or 'none'}."
    raise ExperimentError(f"There is no experiment '{name}'; {remedy}")


def _load(address: str) -> Experiment:
    module, _, attribute = address.partition(":")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ExperimentError(f"'{address}' cannot be loaded ({error}); write package.module:NAME.") from error
    if not isinstance(found, Experiment):
        raise ExperimentError(f"'{address}' is no Experiment; let it name a lazyscope.lab.Experiment.")
    return found
