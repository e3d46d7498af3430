"""Comparisons of a model with its linearisation, and certificates of the theorems."""

from lazyscope.certify.comparison import certify, compare, rank

__all__ = ["certify", "compare", "rank"]
