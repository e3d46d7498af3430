"""Errors that name the remedy.

Each message is one sentence that says what is wrong and what to do about it; the command line prints
just that sentence. Divergence is not an error: it is a `Status` of the trajectory.
"""


class LazyscopeError(Exception):
    """Anything that lazyscope refuses, with the remedy in its message."""


class ModelError(LazyscopeError):
    """The model cannot be studied as it is (training mode, no parameters, random or mutating forward)."""


class InputError(LazyscopeError):
    """The data do not fit the model or the loss (shape, dtype, device, NaN)."""


class ScaleError(LazyscopeError):
    """The scale α is not a positive number, or is infinite where an uncentred output would be too."""


class OperationError(LazyscopeError):
    """An operation of the user's forward has no increment and no fallback."""


class StoreError(LazyscopeError):
    """Results could not be written or read (disk full, read-only folder, damaged file)."""


class ExperimentError(LazyscopeError):
    """No such experiment, or an experiment declared wrongly."""


class DataError(LazyscopeError):
    """A data set is missing, truncated or corrupt."""
