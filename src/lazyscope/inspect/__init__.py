"""Inspect a model: whether its training is lazy, why, and what would change that."""

from lazyscope.inspect.budget import Budget
from lazyscope.inspect.inspection import inspect
from lazyscope.inspect.report import Report
from lazyscope.inspect.verdict import Verdict, Word

__all__ = ["Budget", "Report", "Verdict", "Word", "inspect"]
