"""Comparisons of a model with its linearisation, and certificates of the theorems."""

from lazyscope.certify.certificates import certify
from lazyscope.certify.comparison import compare, compare_steps
from lazyscope.certify.stochastic import expect

__all__ = ["certify", "compare", "compare_steps", "expect"]
