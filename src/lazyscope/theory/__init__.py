"""Statements: what can be proved about a model, as functions that return the proved number."""

from lazyscope.theory import convex

__all__ = ["convex"]
