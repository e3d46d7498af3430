"""Data: points drawn by seed and images, the same on every machine."""

from lazyscope.data.augment import Batches
from lazyscope.data.images import Images
from lazyscope.data.sphere import sphere

__all__ = ["Batches", "Images", "sphere"]
