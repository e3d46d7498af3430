"""Compare how much the first and the second coding as JPEG change small photographs.

    python benchmarks/coding.py [--quality 75]

Some copies of CIFAR-10 are coded as JPEG, and only a second coding can be measured on them alone. Here photographs
of scikit-learn are reduced to the scale of CIFAR-10, which removes the traces of their own coding, cut into tiles of
32×32 pixels, and coded twice, the second time on another grid of blocks as in `coded_again`.

The changes are also printed for brightness and colour (Y, Cb and Cr of JPEG) and for coarse and fine detail: below and
above a quarter of the sampling rate, by a cosine transform of each tile. "left" is the share of the energy of the
photographs that the first coding leaves.
"""

from __future__ import annotations

import argparse
import io
from typing import Any

import numpy as np
import torch
from PIL import Image
from scipy.fft import dctn
from sklearn.datasets import load_sample_images

from lazyscope.data.images import Images
from lazyscope.data.jpeg import coded_again

SIDE, FACTORS = 32, (4, 6, 8)
COLOURS = {"brightness": (0.299, 0.587, 0.114), "blue": (-0.169, -0.331, 0.5), "red": (0.5, -0.419, -0.081)}


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


def energies(pixels: np.ndarray) -> dict[str, float]:
    """The mean square of the coarse and of the fine part of brightness and of both colours, without the means."""
    index = np.maximum(*np.meshgrid(np.arange(SIDE), np.arange(SIDE)))
    bands = {"coarse": (index > 0) & (index < SIDE // 2), "fine": index >= SIDE // 2}
    found: dict[str, float] = {}
    for name, weights in COLOURS.items():
        squares = dctn(pixels.astype(float) @ np.array(weights), axes=(1, 2), norm="ortho") ** 2
        found |= {f"{name}, {band}": squares[:, rows].sum() / squares.size for band, rows in bands.items()}
    return found


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
        before, after = energies(original), energies(once)
        one, two = energies(once.astype(float) - original), energies(twice.astype(float) - once)
        for part in before:
            print(
                f"  {part:20} {one[part]:7.2f} and {two[part]:5.2f}, ratio {one[part] / two[part]:5.1f},"
                f" left {100 * after[part] / before[part]:4.0f} %"
            )


if __name__ == "__main__":
    main()
