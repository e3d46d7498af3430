"""Optional dependencies, which are imported when they are needed. Errors name the extra that installs them."""

from __future__ import annotations

import importlib
from types import ModuleType

from lazyscope.errors import MissingExtraError


def required(module: str, extra: str, purpose: str) -> ModuleType:
    """Import a module that belongs to an extra.

    Args:
        module: The name of the module, such as `"pyarrow.parquet"`.
        extra: The extra of lazyscope that installs it, such as `"data"`.
        purpose: What the module is needed for, as the plural subject of the error message, such as `"Parquet files"`.

    Returns:
        The imported module.

    Raises:
        MissingExtraError: If the module is not installed.

    Example:
        >>> required("json", "data", "JSON files").dumps([1])
        '[1]'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingExtraError(f"{purpose} need {package} ({error}); run: pip install 'lazyscope[{extra}]'") from error
