"""Compute the kernels of ten architectures with neural-tangents, as constants for the tests.

neural-tangents 0.6.5 does not import on a current version of JAX. In a new environment of Python 3.11:

    python -m venv nt
    nt/bin/pip install neural-tangents==0.6.5 jax==0.4.30 jaxlib==0.4.30 "numpy<2" "scipy<1.13"
    nt/bin/python benchmarks/neural_tangents_constants.py > tests/tangent/neural_tangents.json

The inputs are functions of their indices, so that both libraries have the same ones without a common random generator.
Each layer has W_std² = 1.7 and b_std² = 0.2, in the NTK parametrisation. The file contains the NTK and the NNGP kernel
of three inputs for each architecture.
"""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np

jax.config.update("jax_enable_x64", True)

from neural_tangents import stax  # noqa: E402

STD = {"W_std": float(np.sqrt(1.7)), "b_std": float(np.sqrt(0.2))}


def inputs(*shape: int) -> np.ndarray:
    """The numbers sin(1), sin(2), … in the given shape."""
    return np.sin(np.arange(1, np.prod(shape) + 1)).reshape(shape)


def dense() -> Any:
    return stax.Dense(1, **STD)


def conv(*size: int, strides: tuple[int, ...] | None = None, padding: str = "SAME") -> Any:
    return stax.Conv(1, size, strides=strides, padding=padding, **STD)


def residual(*layers: Any) -> Any:
    return stax.serial(stax.FanOut(2), stax.parallel(stax.Identity(), stax.serial(*layers)), stax.FanInSum())


IMAGES, POINTS, TEXT = (3, 4, 4, 2), (3, 5), (3, 6, 3)

NETS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "relu": (stax.serial(dense(), stax.Relu(), dense(), stax.Relu(), dense()), POINTS),
    "erf": (stax.serial(dense(), stax.Erf(), dense(), stax.Erf(), dense()), POINTS),
    "gelu": (stax.serial(dense(), stax.Gelu(), dense(), stax.Gelu(), dense()), POINTS),
    "leaky, abs, sine": (
        stax.serial(dense(), stax.LeakyRelu(0.2), dense(), stax.Abs(), dense(), stax.Sin(), dense()),
        POINTS,
    ),
    "residual": (
        stax.serial(dense(), residual(stax.Relu(), dense()), residual(stax.Relu(), dense()), stax.Relu(), dense()),
        POINTS,
    ),
    "flattened": (
        stax.serial(conv(3, 3), stax.Relu(), conv(3, 3), stax.Relu(), stax.Flatten(), dense()),
        IMAGES,
    ),
    "pooled": (
        stax.serial(conv(3, 3), stax.Relu(), conv(3, 3), stax.Relu(), stax.GlobalAvgPool(), dense()),
        IMAGES,
    ),
    "vgg": (
        stax.serial(
            conv(3, 3),
            stax.Relu(),
            stax.AvgPool((2, 2), strides=(2, 2)),
            conv(3, 3),
            stax.Relu(),
            stax.AvgPool((2, 2), strides=(2, 2)),
            stax.Flatten(),
            dense(),
            stax.Relu(),
            dense(),
        ),
        IMAGES,
    ),
    "strides": (
        stax.serial(
            conv(2, 2, strides=(2, 2), padding="VALID"),
            stax.Relu(),
            conv(2, 1, padding="VALID"),
            stax.Relu(),
            stax.Flatten(),
            dense(),
        ),
        IMAGES,
    ),
    "sequence": (
        stax.serial(
            conv(3, padding="VALID"), stax.Relu(), conv(2, padding="VALID"), stax.Erf(), stax.GlobalAvgPool(), dense()
        ),
        TEXT,
    ),
    "concatenation": (
        stax.serial(
            stax.FanOut(2),
            stax.parallel(
                stax.serial(stax.Dense(16, **STD), stax.Relu()), stax.serial(stax.Dense(8, **STD), stax.Erf())
            ),
            stax.FanInConcat(-1),
            dense(),
            stax.Relu(),
            dense(),
        ),
        POINTS,
    ),
}


def main() -> None:
    """Print the constants."""
    found = {}
    for name, ((_, _, kernel), shape) in NETS.items():
        both = jax.jit(lambda x, kernel=kernel: kernel(x, None, ("ntk", "nngp")))(inputs(*shape))
        found[name] = {"ntk": np.asarray(both.ntk).tolist(), "nngp": np.asarray(both.nngp).tolist()}
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
