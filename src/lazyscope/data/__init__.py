"""Data: points drawn by seed, the same on every machine."""

from lazyscope.data.sphere import sphere

__all__ = ["sphere"]
