"""The type aliases that appear in signatures throughout the package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from torch import Tensor

Number: TypeAlias = float | int
"""A real number. The union is explicit because run-time type checkers do not accept an int as a float."""

Params: TypeAlias = Mapping[str, Tensor]
"""Parameters by name. The weights `w`, the increment `v` and every gradient have this form."""

Inputs: TypeAlias = Any
"""The inputs of a model: a tensor, a tuple of tensors (positional) or a dict of tensors (by keyword)."""
