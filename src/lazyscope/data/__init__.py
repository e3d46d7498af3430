"""Data sets: random points and images, which are the same on every machine for the same seed."""

from lazyscope.data.augment import Batches
from lazyscope.data.images import Images
from lazyscope.data.sphere import sphere

__all__ = ["Batches", "Images", "sphere"]
