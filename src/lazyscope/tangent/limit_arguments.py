"""Checks of the arguments that the kernels of infinite width have in common."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from lazyscope.errors import InputError

Kind: TypeAlias = Literal["ntk", "nngp"]
Parametrisation: TypeAlias = Literal["ntk", "standard"]


def check_kind(kind: Any) -> None:
    """Check which kernel is asked for.

    Args:
        kind: The argument `kind` of `limit_kernel`.

    Raises:
        InputError: If it is neither "ntk" nor "nngp".
    """
    if not isinstance(kind, str) or kind not in ("ntk", "nngp"):
        raise InputError(f'kind={kind!r} is not known; pass "ntk" or "nngp".')


def check_parametrisation(parametrisation: Any) -> None:
    """Check with respect to what gradients are taken.

    Args:
        parametrisation: The argument `parametrisation` of `limit_kernel`.

    Raises:
        InputError: If it is neither "ntk" nor "standard".
    """
    if not isinstance(parametrisation, str) or parametrisation not in ("ntk", "standard"):
        raise InputError(f'parametrisation={parametrisation!r} is not known; pass "ntk" or "standard".')
