"""Compute the kernels of some architectures with neural-tangents, as constants for the tests.

neural-tangents 0.6.5 does not import on a current version of JAX. In a new environment of Python 3.11:

    python -m venv nt
    nt/bin/pip install neural-tangents==0.6.5 jax==0.4.30 jaxlib==0.4.30 "numpy<2" "scipy<1.13"
    nt/bin/python benchmarks/neural_tangents_constants.py > tests/tangent/neural_tangents.json

The inputs are functions of their indices, so that both libraries have the same ones without a common random generator.
Each layer has W_std² = 1.7 and b_std² = 0.2, in the NTK parametrisation. The file contains the NTK and the NNGP kernel
of three inputs for each architecture.

Where both libraries have an operation in several forms, the one here is the one that is mathematically the same:

- Layer normalisation is over the channels of each position (`axis=-1`), with torch's ε = 10⁻⁵ in the place of 10⁻¹².
  neural-tangents also normalises over positions, which lazyscope refuses; lazyscope also normalises activations, which
  neural-tangents refuses.
- Attention is `GlobalSelfAttention` with `linear_scaling=True`: the softmax of q·k/d, where queries and keys are the
  same. Its values have no biases, and the tests leave them out. Biases of queries would add a constant to all logits.
- Queries and keys with different weights have logits that tend to 0. neural-tangents has no such option; its logits are
  0 with `W_query_std=0`.
- Embeddings of positions are inside of the attention layer (`pos_emb_type="SUM"`): added to the inputs of queries, keys
  and values, or of queries and keys only. The residual branch does not contain them.
- `linear_scaling=False` has a kernel only for `"IDENTITY"`, without a softmax, and `"ABS"` and `"RELU"` replace the
  softmax; lazyscope refuses these.
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


def norm() -> Any:
    return stax.LayerNorm(axis=-1, eps=1e-5)


def residual(*layers: Any, shortcut: Any = None) -> Any:
    branches = stax.parallel(shortcut or stax.Identity(), stax.serial(*layers))
    return stax.serial(stax.FanOut(2), branches, stax.FanInSum())


def attention(**options: Any) -> Any:
    stds = {f"W_{name}_std": STD["W_std"] for name in ("key", "query", "value", "out")}
    return stax.GlobalSelfAttention(1, 1, 1, 1, **{**stds, "b_std": STD["b_std"], **options})


def positions(*, values: bool) -> Any:
    return attention(pos_emb_type="SUM", W_pos_emb_std=STD["b_std"], val_pos_emb=values)


IMAGES, ODD_IMAGES, POINTS, TEXT = (3, 4, 4, 2), (3, 5, 7, 2), (3, 5), (3, 6, 3)

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
    "layer norm": (stax.serial(dense(), norm(), stax.Relu(), dense(), norm(), stax.Erf(), dense()), POINTS),
    "pre-norm": (
        stax.serial(
            dense(),
            residual(norm(), dense(), stax.Gelu(), dense()),
            residual(norm(), dense(), stax.Gelu(), dense()),
            norm(),
            dense(),
        ),
        (3, 3),
    ),
    "normed convolutions, flattened": (
        stax.serial(conv(3, 3), norm(), stax.Relu(), conv(3, 3), norm(), stax.Relu(), stax.Flatten(), dense()),
        IMAGES,
    ),
    "normed convolutions, pooled": (
        stax.serial(conv(3, 3), norm(), stax.Relu(), conv(3, 3), norm(), stax.Gelu(), stax.GlobalAvgPool(), dense()),
        IMAGES,
    ),
    "resnet": (
        stax.serial(
            conv(3, 3),
            residual(stax.Relu(), conv(3, 3), stax.Relu(), conv(3, 3)),
            residual(
                stax.Relu(),
                conv(3, 3, strides=(2, 2)),
                stax.Relu(),
                conv(3, 3),
                shortcut=conv(1, 1, strides=(2, 2)),
            ),
            stax.Relu(),
            stax.GlobalAvgPool(),
            dense(),
        ),
        ODD_IMAGES,
    ),
    "mixed strides": (
        stax.serial(
            conv(3, 3, strides=(2, 1)),
            stax.Relu(),
            conv(1, 3, strides=(1, 2), padding="VALID"),
            stax.LeakyRelu(0.1),
            stax.AvgPool((2, 1), strides=(1, 2)),
            conv(2, 2, padding="VALID"),
            stax.Relu(),
            stax.Flatten(),
            dense(),
        ),
        ODD_IMAGES,
    ),
    "attention": (stax.serial(dense(), attention(), stax.Relu(), stax.Flatten(), dense()), TEXT),
    "attention with constant logits": (
        stax.serial(dense(), stax.Relu(), attention(W_query_std=0.0), stax.Relu(), stax.Flatten(), dense()),
        TEXT,
    ),
    "attention with positions": (
        stax.serial(dense(), residual(positions(values=True)), norm(), stax.Relu(), stax.GlobalAvgPool(), dense()),
        TEXT,
    ),
    "attention with positions of queries": (
        stax.serial(dense(), residual(positions(values=False)), norm(), stax.Relu(), stax.GlobalAvgPool(), dense()),
        TEXT,
    ),
    "transformer": (
        stax.serial(
            dense(),
            residual(norm(), positions(values=True)),
            residual(norm(), dense(), stax.Gelu(), dense()),
            residual(norm(), attention()),
            residual(norm(), dense(), stax.Gelu(), dense()),
            norm(),
            stax.GlobalAvgPool(),
            dense(),
        ),
        TEXT,
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
