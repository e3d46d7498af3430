"""The best learning rate against the richness γ = 1/α: η* ∝ γ² for small γ, and γ^(2/L) for large γ and depth L.

Steps are taken in the weights: w ← w - η∇_w R(αh(w)). In the coordinates v = α(w - w₀) of this library, the same step
has the length η/γ². Lazy nets keep their kernel, so that the best step in v does not depend on γ. For large γ, the
weights of an L-homogeneous net have to grow by γ^(1/L), its kernel by γ^(2-2/L), and the best step in v shrinks by as
much: η* ∝ γ² · γ^(-(2-2/L)) = γ^(2/L). The last panel is the model of Lewkowycz et al., h = u·v/√m on one sample, whose
loss first increases and then converges to a flatter minimum for steps between 2/λ and 4/λ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import normalize

from lazyscope.flow.descent import gradient_descent
from lazyscope.lab.experiment import Claim, Experiment, Params, Result, Trials
from lazyscope.lab.fit import against, exponent
from lazyscope.lab.style import BLACK, COLOURS, panels
from lazyscope.loss import Square
from lazyscope.model.base import Model
from lazyscope.model.ensemble import Ensemble
from lazyscope.stream import stream
from lazyscope.tangent.kernel import tangent_kernel

DEPTHS = (2, 3, 5)
DIM, POINTS, WIDTH = 5, 16, 16
LAZY, RICH = 1e-4, 30.0
"""The exponents are fitted for γ up to LAZY and from RICH on. A catapult of a lazy net multiplies the loss by about
2γ⁻² before it falls again. `gradient_descent` counts a factor of 10⁶ as divergence, so that catapults double the best
step above γ ≈ 10⁻³ only; a fit across this jump would give 2.15."""
FACTORS = 2 ** np.arange(-1.5, 6.1, 0.5)
"""The step sizes that are compared, as multiples of a step that has the exponents of the source; the best one must not
be the first or the last, so that other exponents would be seen."""
BAND = 0.1
CATAPULT_WIDTH = 1000
MULTIPLES = np.array([0.5, 1.0, 1.5, 1.9, 2.2, 2.6, 3.0, 3.4, 3.8, 4.2, 5.0])
"""The step sizes of the catapult, in units of 1/λ."""


def grid(scale: str) -> list[Params]:
    """List depths × seeds, and the catapult; `quick` omits depth 5, which needs the most steps.

    A net of depth L leaves its start after about γ^(1-2/L) steps of the best size.
    """
    paper = scale == "paper"
    points: list[Params] = [
        {"kind": "rates", "depth": depth, "seed": seed, "steps": 1000 if paper else few, "fine": paper}
        for depth, few in zip(DEPTHS if paper else DEPTHS[:2], (200, 300, 0), strict=False)
        for seed in range(9 if paper else 3)
    ]
    return [*points, {"kind": "catapult"}]


def trial(points: list[Params], device: torch.device) -> list[Result]:
    """Train the nets of one depth at all γ and step sizes in one batch."""
    found: dict[int, Result] = {}
    for depth in sorted({int(point.get("depth", 0)) for point in points}):
        places = [i for i, point in enumerate(points) if point.get("depth", 0) == depth]
        some = [points[i] for i in places]
        found |= zip(places, _rates(some, device) if depth else [_catapult(device)], strict=True)
    return [found[i] for i in range(len(points))]


def richnesses(fine: bool) -> np.ndarray:
    """Return the values of γ."""
    return np.array(
        [1e-6, 1e-5, 1e-4, 1e-2, 0.1, 1, 10, 30, 100, 300, 1e3, 3e3] if fine else [1e-6, 1e-4, 30, 170, 1e3]
    )


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

    def forward(w: Mapping[str, Tensor], x: Tensor) -> Tensor:
        for i in range(depth - 1):
            x = torch.relu(x @ w[f"w{i}"].mT)
        return x @ w[f"w{depth - 1}"].mT

    return Model(forward, w)


def _sharpness(model: Model, x: Tensor) -> float:
    """The largest eigenvalue of the tangent kernel over n, which is that of the Hessian where the loss is 0."""
    return float(torch.linalg.eigvalsh(tangent_kernel(model, x)[:, :, 0, 0])[-1]) / len(x)


def _rates(points: list[Params], device: torch.device) -> list[Result]:
    """Find the best step size for each γ, for several seeds of a depth."""
    depth, gammas = int(points[0]["depth"]), richnesses(bool(points[0]["fine"]))
    x = math.sqrt(DIM) * normalize(torch.randn(POINTS, DIM, generator=stream(0, 0), dtype=torch.float64), dim=1)
    x, nets = x.to(device), [net(depth, int(point["seed"])).to(device) for point in points]
    first = np.array([_sharpness(model, x) for model in nets])
    guess = 2 / first[:, None] * np.minimum(1, 1 / gammas) ** (2 - 2 / depth)
    steps = guess[..., None] * FACTORS  # (seeds, γ, factors)
    path = gradient_descent(
        Ensemble([model for model in nets for _ in range(steps[0].size)]),
        Square(),
        x,
        x[:, :1] * x[:, 1:2],
        lr=torch.from_numpy(steps.ravel()),
        steps=int(points[0]["steps"]),
        alpha=torch.from_numpy(np.broadcast_to(1 / gammas[:, None], steps.shape).ravel().copy()),
        centred=True,
        record=2,
        keep_params=True,
    )
    assert path.params is not None
    losses = torch.where(path.diverged, math.inf, path.loss[-1]).cpu().numpy().reshape(steps.shape)
    losses = np.where(np.isfinite(losses), losses, np.inf)
    moves = {name: v[-1].unflatten(0, steps.shape) for name, v in path.params.items()}
    results: list[Result] = []
    for i, model in enumerate(nets):
        best, last = losses[i].argmin(-1), []
        chosen = steps[i, np.arange(len(gammas)), best]
        for j, gamma in enumerate(gammas):
            end = {name: w + float(gamma) * moves[name][i, j, int(best[j])] for name, w in model.params.items()}
            last.append(_sharpness(model.at(end), x))
        inside = (best > 0) & (best < len(FACTORS) - 1)
        results.append(
            {
                "best": np.where(inside, chosen * gammas**2, np.nan),
                "edge": chosen * np.array(last) / 2,
                "sharpness": np.array(last) / first[i],
                "losses": losses[i],
            }
        )
    return results


def _catapult(device: torch.device) -> Result:
    """Train h = u·v/√m on one sample with target 0, with steps c/λ."""
    m, random = CATAPULT_WIDTH, stream(0, 2)
    w = {name: torch.randn(m, generator=random, dtype=torch.float64) for name in ("u", "v")}
    model = Model(lambda w, x: x @ (w["u"] * w["v"]).sum().reshape(1, 1) / math.sqrt(m), w).to(device)
    x, y = torch.ones(1, 1, dtype=torch.float64, device=device), torch.zeros(1, 1, dtype=torch.float64, device=device)
    first = _sharpness(model, x)
    path = gradient_descent(
        Ensemble([model] * len(MULTIPLES)),
        Square(),
        x,
        y,
        lr=torch.from_numpy(MULTIPLES / first),
        steps=300,
        record=301,
        observe=lambda v: {"λ": torch.stack([(v[k] + w).square().sum(-1) for k, w in model.params.items()]).sum(0) / m},
    )
    losses, sharpness = path.loss.cpu().numpy(), path.observed["λ"].cpu().numpy()
    return {
        "peak": np.nanmax(losses, axis=0) / losses[0],
        "end": losses[-1] / losses[0],
        "diverged": path.diverged.cpu().numpy().astype(float),
        "product": sharpness[-1] / first * MULTIPLES,
    }


def depths(trials: Trials) -> list[int]:
    """Return the depths that have trials."""
    return [depth for depth in DEPTHS if len(trials.where(kind="rates", depth=depth))]


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
    for depth in depths(trials):
        fitted = slopes(trials, depth)
        # In lazy training, the best step in tangent coordinates, η*/γ², does not depend on γ.
        for name, power, band in (("lazy", 2.0, 0.01), ("rich", 2 / depth, BAND)):
            mean, several = float(fitted[name].mean()), fitted[name]
            found.append(
                Claim(
                    f"L = {depth}, {'small' if name == 'lazy' else 'large'} γ: η* ∝ γ^s, s = {power:.2f} ± {band:g}",
                    "Atanasov et al. 2025: 2 and then 2/L",
                    f"s = {against(mean, power)}; seeds {several.min():.2f} to {several.max():.2f}",
                    abs(mean - power) <= band,
                )
            )
    runs = trials.where(kind="rates")
    rich = richnesses(bool(runs[0].params["fine"])) >= RICH
    edges = runs.column("edge")[:, rich]
    centre = float(np.median(edges))
    (jump,) = trials.where(kind="catapult")
    peak, end, gone, product = (np.asarray(jump.result[name]) for name in ("peak", "end", "diverged", "product"))
    below, above = MULTIPLES < 2, MULTIPLES > 4
    between = ~(below | above)
    return [
        *found,
        Claim(
            "large γ: the best step ends at the edge of stability, η*λ/2 = 1 ± 0.15 in the median",
            "Cohen et al. 2021: λ ≈ 2/η",
            f"{against(centre, 1)}; from {edges.min():.2f} to {edges.max():.2f}",
            abs(centre - 1) <= 0.15,
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
    for depth, colour in zip(depths(trials), COLOURS, strict=False):
        some = trials.where(kind="rates", depth=depth)
        gammas = richnesses(bool(some[0].params["fine"]))
        fitted = slopes(trials, depth)
        label = f"$L={depth}$: {fitted['lazy'].mean():.2f}, {fitted['rich'].mean():.2f}"
        middle = np.exp(np.log(some.column("best")).mean(0))
        rates.plot(gammas, middle, "o-", ms=3, color=colour, label=label)
        edge.plot(gammas, np.median(some.column("edge"), axis=0), "o-", ms=3, color=colour, label=f"$L={depth}$")
    rates.set(title="mean over the seeds", xlabel=r"richness $\gamma=1/\alpha$", xscale="log", yscale="log")
    rates.set_ylabel(r"best learning rate $\eta^*$")
    rates.legend(title="exponents: lazy, rich", alignment="left")
    edge.axhline(1, color=BLACK, lw=0.8, ls="--", label="edge of stability")
    edge.set(title="median over the seeds", xlabel=r"richness $\gamma=1/\alpha$", xscale="log")
    edge.set(ylabel=r"$\eta^*\lambda/2$ at the end")
    edge.set_ylim(bottom=0)
    edge.legend(loc="lower left")
    (jump,) = trials.where(kind="catapult")
    kept = np.asarray(jump.result["diverged"]) == 0
    catapult.plot(MULTIPLES[kept], np.asarray(jump.result["peak"])[kept], "o-", ms=3, label="largest / first loss")
    catapult.plot(
        MULTIPLES[kept], np.asarray(jump.result["product"])[kept], "o-", ms=3, label=r"$\eta\lambda$ at the end"
    )
    for border in (2, 4):
        catapult.axvline(border, color=BLACK, lw=0.8, ls="--")
    catapult.set(title="catapult", xlabel=r"$\eta\lambda$ at the start", ylabel="ratio, product", yscale="log")
    catapult.set_ylim(bottom=catapult.get_ylim()[0] / 20)  # room for the legend
    catapult.legend(loc="lower left", frameon=True, framealpha=1, edgecolor="none")  # covers the lines
    return page


EXPERIMENT = Experiment(
    name="richness",
    source="Atanasov, Meterez, Simon, Pehlevan 2025; Lewkowycz et al. 2020",
    title="The best learning rate against richness",
    caption=(
        "The best learning rate η* of nets with L layers is measured as the scale 1/α of feature learning"
        " varies, with the largest eigenvalue λ of the kernel. It follows one power law in lazy training and another in"
        " rich training, with catapults between the dashed lines (right): the loss rises, and λ falls below 2/η."
    ),
    cost={"quick": "10 s on two cores", "paper": "5 min on two cores"},
    grid=grid,
    trial=trial,
    figure=figure,
    claims=claims,
    chunk=3,  # seeds of one depth
)
