"""Errors for a forward that fails or whose output cannot be studied, each with its remedy."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lazyscope._typing import Inputs, Params
from lazyscope.errors import InputError, LazyscopeError, ModelError
from lazyscope.model.forward import Forward
from lazyscope.model.inputs import Samples, flatten

_SHAPE = re.compile(
    r"shape|size|dimension|channels|out of range|broadcast|rank|Expected \d-D|must match", re.IGNORECASE
)
"""Words that occur in torch's errors about shapes."""


def explained(forward: Forward, error: Exception, params: Params, state: Params, x: Inputs) -> LazyscopeError:
    """Return the error that explains a failed forward and names the remedy."""
    leaves = flatten(x)[1]
    first = next(iter(params.values()))
    if any(t.device != first.device for t in leaves):
        places = sorted({str(t.device) for t in leaves})
        return InputError(
            f"The model is on {first.device} and the inputs are on {', '.join(places)}; move one to the other."
        )
    reason = " ".join(str(error).splitlines()[:1]) or type(error).__name__
    if any(not t.is_floating_point() for t in leaves) and _accepts(
        forward, params, state, x, lambda t: t.to(first.dtype)
    ):
        return InputError(f"The model computes on floats but the inputs are integers; pass x.to({first.dtype}).")
    if any(t.is_floating_point() and t.dtype != first.dtype for t in leaves) and _accepts(
        forward, params, state, x, lambda t: t.to(first.dtype) if t.is_floating_point() else t
    ):
        return InputError(f"The model is in {first.dtype} and the inputs are not ({reason}); pass x.to({first.dtype}).")
    shapes = [tuple(t.shape) for t in leaves]
    if _SHAPE.search(reason):
        return InputError(
            f"The model rejects inputs of shape {shapes}: {reason}; check the shape that its forward expects."
        )
    return InputError(
        f"The model's forward failed on inputs of shape {shapes} ({type(error).__name__}: {reason}); call the model"
        " on them in Python to see where."
    )


def _accepts(forward: Forward, params: Params, state: Params, x: Inputs, change: Callable[[Tensor], Tensor]) -> bool:
    try:
        forward(params, state, Samples(x).map(change))
    except Exception:  # the user's own forward may raise anything
        return False
    return True


def check_output(out: Any) -> Tensor:
    """Return the output if it is one floating-point tensor, or raise an error that names the remedy."""
    if isinstance(out, Tensor) and out.is_complex():
        raise ModelError(
            "The model returns complex numbers; study their real and imaginary parts with"
            " Model(net, output=torch.view_as_real)."
        )
    if not isinstance(out, Tensor) or not out.is_floating_point():
        named = [key for key, value in out.items() if isinstance(value, Tensor)] if isinstance(out, Mapping) else []
        example = repr(named[0]) if named else "0" if isinstance(out, tuple | list) else "lambda out: …"
        raise ModelError(
            f"The model must return one floating-point tensor but returned {type(out).__name__}; choose the part to"
            f" study with Model(net, output={example}), or wrap it in a module that returns that part."
        )
    return out


def check_weights(params: Params) -> None:
    """Raise an error for weights on the meta device and for weights that are not finite."""
    for name, w in params.items():
        if w.device.type == "meta":
            raise ModelError(f"Parameter {name!r} is on the meta device and has no values; load the weights first.")
        if not bool(w.isfinite().all()):
            raise ModelError(f"Parameter {name!r} holds NaN or infinity; initialise it again, or load other weights.")
