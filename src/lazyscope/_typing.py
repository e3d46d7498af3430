"""The types that appear in signatures across all floors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from torch import Tensor

Params: TypeAlias = Mapping[str, Tensor]
"""Parameters by name: the shape of `w`, of `v` and of every gradient."""

Inputs: TypeAlias = Any
"""What a model takes: a tensor, a tuple of tensors (positional) or a dict of tensors (by keyword)."""
