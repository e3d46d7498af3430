"""The best learning rate against the richness γ = 1/α: η* ∝ γ² for small γ, and γ^(2/L) for large γ and depth L.

Steps are taken in the weights: w ← w - η∇_w R(αh(w)). In the coordinates v = α(w - w₀) of this library, the same step
has the length η/γ². Lazy nets keep their kernel, so that the best step in v does not depend on γ. For large γ, the
weights of an L-homogeneous net have to grow by γ^(1/L), its kernel by γ^(2-2/L), and the best step in v shrinks by as
much: η* ∝ γ² · γ^(-(2-2/L)) = γ^(2/L). The last panel is the model of Lewkowycz et al., h = u·v/√m on one sample, whose
loss first increases and then converges to a flatter minimum for steps between 2/λ and 4/λ.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import normalize

from lazyscope.flow.descent import gradient_descent
from lazyscope.lab.experiment import Claim, Experiment, Params, Result, Trials
from lazyscope.lab.fit import exponent
from lazyscope.lab.style import BLACK, COLOURS, panels
from lazyscope.loss import Square
from lazyscope.model.base import Model
from lazyscope.model.ensemble import Ensemble
from lazyscope.stream import stream
from lazyscope.tangent.kernel import tangent_kernel

DEPTHS = (2, 3, 5)
DIM, POINTS, WIDTH = 5, 16, 16
LAZY, RICH = 0.1, 30.0
"""The exponents are fitted for γ up to LAZY and from RICH on."""
FACTORS = 2 ** np.arange(-2.0, 4.6, 0.5)
"""The step sizes that are compared, as multiples of a step that has the exponents of the source; the best one must not
be the first or the last, so that other exponents would be seen."""
BAND = 0.1
CATAPULT_WIDTH = 1000
MULTIPLES = np.array([0.5, 1.0, 1.5, 1.9, 2.2, 2.6, 3.0, 3.4, 3.8, 4.2, 5.0])
"""The step sizes of the catapult, in units of 1/λ."""


def grid(scale: str) -> list[Params]:
    """List depths × seeds, and the catapult."""
    seeds, steps = (10, 1000) if scale == "paper" else (3, 400)
    points: list[Params] = [
        {"kind": "rates", "depth": depth, "seed": seed, "steps": steps, "fine": scale == "paper"}
        for depth in DEPTHS
        for seed in range(seeds)
    ]
    return [*points, {"kind": "catapult"}]


def trial(points: list[Params], device: torch.device) -> list[Result]:
    """Train one net at all γ and step sizes in one batch."""
    return [{"rates": _rates, "catapult": _catapult}[str(point["kind"])](point, device) for point in points]


def richnesses(fine: bool) -> np.ndarray:
    """Return the values of γ."""
    return np.array([1e-3, 1e-2, 0.1, 1, 10, 30, 100, 300, 1e3, 3e3] if fine else [1e-3, 0.1, 30, 300, 3e3])


def net(depth: int, seed: int) -> Model:
    """Build a ReLU net with L weight matrices and He's initialisation, without biases.

    Args:
        depth: The number L of matrices.
        seed: The seed of the weights.

    Returns:
        The model, in float64, which is L-homogeneous.
    """
    sizes, random = [DIM, *[WIDTH] * (depth - 1), 1], stream(seed, 1)
    w = {
        f"w{i}": torch.randn(out, into, generator=random, dtype=torch.float64) * math.sqrt((1 if i == 0 else 2) / into)
        for i, (into, out) in enumerate(pairwise(sizes))
    }

    def forward(w: dict[str, Tensor], x: Tensor) -> Tensor:
        for i in range(depth - 1):
            x = torch.relu(x @ w[f"w{i}"].mT)
        return x @ w[f"w{depth - 1}"].mT

    return Model(forward, w)


def _sharpness(model: Model, x: Tensor) -> float:
    """The largest eigenvalue of the tangent kernel over n, which is that of the Hessian where the loss is 0."""
    return float(torch.linalg.eigvalsh(tangent_kernel(model, x)[:, :, 0, 0])[-1]) / len(x)


def _rates(point: Params, device: torch.device) -> Result:
    """Find the best step size for each γ."""
    depth, seed, gammas = int(point["depth"]), int(point["seed"]), richnesses(bool(point["fine"]))
    x = math.sqrt(DIM) * normalize(torch.randn(POINTS, DIM, generator=stream(seed, 0), dtype=torch.float64), dim=1)
    x, model = x.to(device), net(depth, seed).to(device)
    y = x[:, :1] * x[:, 1:2]
    first = _sharpness(model, x)
    guess = 2 / first * np.minimum(1, 1 / gammas) ** (2 - 2 / depth)
    steps = guess[:, None] * FACTORS
    path = gradient_descent(
        Ensemble([model] * steps.size),
        Square(),
        x,
        y,
        lr=torch.from_numpy(steps.ravel()),
        steps=int(point["steps"]),
        alpha=torch.from_numpy(np.repeat(1 / gammas, len(FACTORS))),
        centred=True,
        record=2,
        keep_params=True,
    )
    assert path.params is not None
    losses = torch.where(path.diverged, math.inf, path.loss[-1]).cpu().numpy().reshape(steps.shape)
    losses = np.where(np.isfinite(losses), losses, np.inf)
    best = losses.argmin(1)
    inside = (best > 0) & (best < len(FACTORS) - 1)
    chosen = steps[np.arange(len(gammas)), best]
    last = []
    for i, (gamma, k) in enumerate(zip(gammas, best, strict=True)):
        end = {name: w + gamma * path.params[name][-1, i * len(FACTORS) + int(k)] for name, w in model.params.items()}
        last.append(_sharpness(model.at(end), x))
    return {
        "best": np.where(inside, chosen * gammas**2, np.nan),
        "edge": chosen * np.array(last) / 2,
        "sharpness": np.array(last) / first,
        "losses": losses,
    }


def _catapult(_: Params, device: torch.device) -> Result:
    """Train h = u·v/√m on one sample with target 0, with steps c/λ."""
    m, random = CATAPULT_WIDTH, stream(0, 2)
    w = {name: torch.randn(m, generator=random, dtype=torch.float64) for name in ("u", "v")}
    model = Model(lambda w, x: x @ (w["u"] * w["v"]).sum().reshape(1, 1) / math.sqrt(m), w).to(device)
    x, y = torch.ones(1, 1, dtype=torch.float64, device=device), torch.zeros(1, 1, dtype=torch.float64, device=device)
    first = _sharpness(model, x)
    rates = torch.from_numpy(MULTIPLES / first)
    path = gradient_descent(
        Ensemble([model] * len(MULTIPLES)), Square(), x, y, lr=rates, steps=600, record=601, keep_params=True
    )
    assert path.params is not None
    ends = [{k: w + path.params[k][-1, i] for k, w in model.params.items()} for i in range(len(MULTIPLES))]
    losses = path.loss.cpu().numpy()
    return {
        "peak": np.nanmax(losses, axis=0) / losses[0],
        "end": losses[-1] / losses[0],
        "diverged": path.diverged.cpu().numpy().astype(float),
        "product": np.array([_sharpness(model.at(end), x) for end in ends]) / first * MULTIPLES,
    }


def slopes(trials: Trials, depth: int) -> dict[str, np.ndarray]:
    """Fit the exponents of η* in γ for each seed of a depth.

    Args:
        trials: All trials.
        depth: The depth L.

    Returns:
        The exponents at small and at large γ.
    """
    some = trials.where(kind="rates", depth=depth)
    gammas, best = richnesses(bool(some[0].params["fine"])), some.column("best")
    sides = {"lazy": gammas <= LAZY, "rich": gammas >= RICH}
    return {name: np.array([exponent(gammas[side], row[side]) for row in best]) for name, side in sides.items()}


def claims(trials: Trials) -> list[Claim]:
    """Check the exponents, the edge of stability, and the catapult."""
    found = []
    for depth in DEPTHS:
        fitted = slopes(trials, depth)
        for name, power in (("lazy", 2.0), ("rich", 2 / depth)):
            mean, several = float(fitted[name].mean()), fitted[name]
            found.append(
                Claim(
                    f"L = {depth}, {'small' if name == 'lazy' else 'large'} γ: η* ∝ γ^s, s = {power:.2f} ± {BAND}",
                    "Atanasov et al. 2025: 2 and then 2/L",
                    f"s = {mean:.3f}, seeds {several.min():.2f} to {several.max():.2f}",
                    abs(mean - power) <= BAND,
                )
            )
    runs = trials.where(kind="rates")
    edges = np.concatenate([np.asarray(run.result["edge"]) for run in runs])
    centre = float(np.median(edges))
    (jump,) = trials.where(kind="catapult")
    peak, end, gone, product = (np.asarray(jump.result[name]) for name in ("peak", "end", "diverged", "product"))
    below, above = MULTIPLES < 2, MULTIPLES > 4
    between = ~(below | above)
    return [
        *found,
        Claim(
            "the best step is near the edge of stability: η*λ/2 at the end is between 0.3 and 1.1, in the median",
            "Atanasov et al. 2025; Cohen et al. 2021: λ ≈ 2/η",
            f"{centre:.2f}, from {edges.min():.2f} to {edges.max():.2f}",
            bool(0.3 <= centre <= 1.1),
        ),
        Claim(
            "steps below 2/λ: the loss never exceeds its start; above 4/λ: it diverges",
            "Lewkowycz et al. 2020",
            f"largest loss {peak[below].max():.3f} of the first; {np.nansum(gone[above]):g} of {above.sum()} diverge",
            bool(peak[below].max() <= 1 + 1e-9 and (gone[above] == 1).all()),
        ),
        Claim(
            "steps between 2/λ and 4/λ: the loss rises at least twofold, then converges where ηλ < 2",
            "Lewkowycz et al. 2020: the catapult",
            f"rises {peak[between].min():.1f} times or more, ends at ηλ from {product[between].min():.2f} to"
            f" {product[between].max():.2f}",
            bool(peak[between].min() >= 2 and end[between].max() < 1e-6 and product[between].max() < 2),
        ),
    ]


def figure(trials: Trials) -> Figure:
    """Draw η* against γ, the growth of the kernel, and the catapult."""
    page, axes = panels(1, 3, width=4.2, height=3.4)
    rates, edge, catapult = axes[0]
    for depth, colour in zip(DEPTHS, COLOURS, strict=False):
        some = trials.where(kind="rates", depth=depth)
        gammas = richnesses(bool(some[0].params["fine"]))
        fitted = slopes(trials, depth)
        label = f"$L={depth}$: {fitted['lazy'].mean():.2f}, {fitted['rich'].mean():.2f}"
        middle = np.exp(np.log(some.column("best")).mean(0))
        rates.plot(gammas, middle, "o-", ms=3, color=colour, label=label)
        edge.plot(gammas, np.median(some.column("edge"), axis=0), "o-", ms=3, color=colour, label=f"$L={depth}$")
    rates.set(title=r"best learning rate $\eta^*$", xlabel=r"richness $\gamma=1/\alpha$", xscale="log", yscale="log")
    rates.legend(fontsize="small", title="exponents", title_fontsize="small")
    edge.axhline(1, color=BLACK, lw=1, ls="--", label="edge of stability")
    edge.set(title=r"$\eta^*\lambda/2$ at the end", xlabel=r"richness $\gamma=1/\alpha$", xscale="log")
    edge.set_ylim(bottom=0)
    edge.legend(fontsize="small")
    (jump,) = trials.where(kind="catapult")
    kept = np.asarray(jump.result["diverged"]) == 0
    catapult.plot(MULTIPLES[kept], np.asarray(jump.result["peak"])[kept], "o-", ms=3, label="largest loss / first loss")
    catapult.plot(
        MULTIPLES[kept], np.asarray(jump.result["product"])[kept], "o-", ms=3, label=r"$\eta\lambda$ at the end"
    )
    for border in (2, 4):
        catapult.axvline(border, color=BLACK, lw=1, ls="--")
    catapult.set(title="catapult", xlabel=r"$\eta\lambda$ at the start", yscale="log")
    catapult.legend(fontsize="small")
    return page


EXPERIMENT = Experiment(
    name="richness",
    source="Atanasov, Meterez, Simon, Pehlevan 2025; Lewkowycz et al. 2020",
    title="The best learning rate against richness",
    cost={"quick": "10 s on two cores", "paper": "8 min on two cores"},
    grid=grid,
    trial=trial,
    figure=figure,
    claims=claims,
)
