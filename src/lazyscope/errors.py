"""The exceptions that lazyscope raises.

Each message is one sentence that states what is wrong and how to fix it; the command line prints only that
sentence. Divergence of a training run is not an error: it is reported as the `Status` of the trajectory.
"""


class LazyscopeError(Exception):
    """The base class of all exceptions that lazyscope raises. The message explains how to fix the problem."""


class ModelError(LazyscopeError):
    """The model cannot be studied as it is (for example: it is in training mode, has no parameters, or its forward is
    random or mutates state).
    """


class InputError(LazyscopeError):
    """The data do not match the model or the loss (for example in shape, dtype or device), or contain NaN."""


class ScaleError(LazyscopeError):
    """The scale α is not a positive number, or it is infinite for a model that is not centred."""


class OperationError(LazyscopeError):
    """An operation in the model's forward pass has no increment rule and no fallback."""


class StoreError(LazyscopeError):
    """Results could not be written or read (for example: full disk, read-only folder, damaged file)."""


class ExperimentError(LazyscopeError):
    """The experiment does not exist, is declared incorrectly, or failed."""


class MissingExtraError(LazyscopeError):
    """An optional dependency is not installed; the message names the extra that installs it."""


class DataError(LazyscopeError):
    """A data set is missing, truncated or corrupt."""
