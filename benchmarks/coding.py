"""Compare how much the first and the second coding as JPEG change small photographs.

    python benchmarks/coding.py [--quality 75]

CIFAR-10 on the Hugging Face hub is coded as JPEG once, and only a second coding can be measured on it. Here photographs
of scikit-learn are reduced to the scale of CIFAR-10, which removes the traces of their own coding, cut into tiles of
32×32 pixels, and coded twice, the second time on another grid of blocks as in `coded_again`.
"""

from __future__ import annotations

import argparse
import io
from typing import Any

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_images

from lazyscope.data.images import Images
from lazyscope.data.jpeg import coded_again

SIDE, FACTORS = 32, (4, 6, 8)


def tiles(factor: int) -> np.ndarray:
    """Tiles of all photographs, reduced by a factor."""
    found = []
    for photograph in load_sample_images().images:
        height, width, _ = (size // factor for size in photograph.shape)
        small = np.asarray(Image.fromarray(photograph).resize((width, height), Image.Resampling.LANCZOS))
        corners = [(i, j) for i in range(0, height - SIDE + 1, SIDE) for j in range(0, width - SIDE + 1, SIDE)]
        found += [small[i : i + SIDE, j : j + SIDE] for i, j in corners]
    return np.stack(found)


def coded(tile: np.ndarray, quality: int) -> Any:
    """A tile coded as JPEG for the first time."""
    file = io.BytesIO()
    Image.fromarray(tile).save(file, "JPEG", quality=quality)
    return np.asarray(Image.open(file))


def main() -> None:
    """Print the mean squares of both changes, for several reductions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quality", type=int, default=75)
    quality = parser.parse_args().quality
    for factor in FACTORS:
        original = tiles(factor)
        once = np.stack([coded(tile, quality) for tile in original])
        pixels, labels = torch.from_numpy(once.transpose(0, 3, 1, 2).copy()), torch.zeros(len(once), dtype=torch.long)
        images = Images(pixels, labels, mean=(0.5,) * 3, std=(0.25,) * 3)
        twice = coded_again(images, quality=quality).pixels.numpy().transpose(0, 2, 3, 1)
        first, second = (np.square(a.astype(float) - b).mean() for a, b in ((once, original), (twice, once)))
        print(f"reduced by {factor}, {len(once)} tiles: {first:.1f} and {second:.1f}, ratio {first / second:.2f}")


if __name__ == "__main__":
    main()
