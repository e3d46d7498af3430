"""The figures of the sources, in one short file per figure.

A file in this folder that defines `EXPERIMENT = Experiment(...)` is discovered automatically.
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
    """Return all experiments of this folder by name, in alphabetical order."""
    modules = [importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]
    found = [module.EXPERIMENT for module in modules if hasattr(module, "EXPERIMENT")]
    return {experiment.name: experiment for experiment in sorted(found, key=lambda e: e.name)}


def find(name: str) -> Experiment:
    """Return an experiment by its name.

    Args:
        name: The name of an experiment of this folder, or `package.module:NAME` for the user's own experiment, whose
            module must be importable from the current folder.

    Returns:
        The experiment.

    Raises:
        ExperimentError: If there is no such experiment.
    """
    if ":" in name:
        return _load(name)
    known = experiments()
    if name in known:
        return known[name]
    close = difflib.get_close_matches(name, known, n=1)
    remedy = f"did you mean '{close[0]}'?" if close else f"the experiments are {', '.join(known) or 'none'}."
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
        raise ExperimentError(f"'{address}' is not an Experiment; give the address of a lazyscope.lab.Experiment.")
    return found
