"""Diagonal linear nets: α moves the limit of training from the least ℓ₁ norm to the least ℓ₂ norm, in closed form.

The model is ⟨u^D - v^D, x⟩ with u = v = 1 at the start, and α is that of `Scaled`. A start at u = v = λ, as in the
source, is α = λ^D. `theory.diagonal` derives the function Q_α whose minimum is the limit of the flow. The flow is stiff
for small α, since the kernel grows by (β/α)^{2-2/D}; SciPy's implicit solver integrates it for every α, and
`gradient_flow` for some α ≥ 1, so that each of the three computations checks the others.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
from matplotlib.figure import Figure
from scipy.optimize import linprog

from lazyscope.diagnose.drift import kernel_alignment
from lazyscope.flow.ode import gradient_flow
from lazyscope.lab.experiment import Claim, Experiment, Params, Result, Trials
from lazyscope.lab.fit import against, exponent
from lazyscope.lab.style import BLACK, COLOURS, panels
from lazyscope.loss import Square
from lazyscope.problem.diagonal import horizon, net, sparse_problem, stiff_flow
from lazyscope.tangent.kernel import tangent_kernel
from lazyscope.theory.diagonal import interpolator
from lazyscope.theory.relative_scale import relative_scale

DEPTHS = (2, 3, 5)
TOLERANCE = 1e-6
SPARSE = 2
"""The number of nonzero entries of β* in the small problems whose flow is integrated."""
ENOUGH = 0.025
"""The error |β - β*|² that counts as recovered, as in the source, which adds a small noise to the targets."""


def grid(scale: str) -> list[Params]:
    """List the flows, then the recoveries of a sparse β* from n samples."""
    paper = scale == "paper"
    dim, samples, most = (40, 15, 1e3) if paper else (16, 6, 1.0)
    alphas = [10 ** (power / 2) for power in (range(-12, 7) if paper else range(-10, 5, 2))]
    points: list[Params] = [
        {
            "kind": "flow",
            "depth": depth,
            "alpha": alpha,
            "seed": seed,
            "dim": dim,
            "samples": samples,
            "explicit": 1 <= alpha <= most and (paper or depth < 5),
        }
        for depth in DEPTHS
        for seed in range(3 if paper else 1)
        for alpha in alphas
    ]
    dim, sparse, counts = (
        (1000, 5, [*range(20, 200, 20), *range(200, 1001, 100)]) if paper else (60, 3, range(6, 61, 9))
    )
    return points + [
        {"kind": "recovery", "depth": depth, "alpha": alpha, "dim": dim, "sparse": sparse, "samples": n, "seeds": 3}
        for depth in ((2, 3) if paper else (2,))
        for alpha in ((1e-8, 1e-6, 1e-4, 1e-2, 1.0, 100.0) if paper else (1e-6, 1e-3, 100.0))
        for n in counts
    ]


def trial(points: list[Params], device: torch.device) -> list[Result]:
    """Integrate a flow to its end, or recover β* from n samples; both are small and run on the CPU."""
    return [{"flow": _flow, "recovery": _recovery}[str(point["kind"])](point) for point in points]


def _flow(point: Params) -> Result:
    """Compare the limit of the flow with the minimiser of Q_α, and the kernel with that of the start."""
    depth, alpha, dim = int(point["depth"]), float(point["alpha"]), int(point["dim"])
    x, y, _ = sparse_problem(dim, SPARSE, int(point["samples"]), int(point["seed"]))
    model, expected = net(depth, dim), interpolator(x, y, alpha, depth=depth)
    u, v = torch.from_numpy(stiff_flow(x, y, alpha, depth))
    beta = alpha * (u**depth - v**depth)
    kernels = [tangent_kernel(each, x) for each in (model, model.at({"u": u, "v": v}))]
    least = linprog(np.ones(2 * dim), A_eq=np.hstack([x, -x]), b_eq=y.numpy())
    result: Result = {
        "error": float((beta - expected).abs().max()),
        "l1": float(beta.abs().sum()) / float(least.fun),
        "l2": float(beta.norm()) / float(interpolator(x, y, math.inf).norm()),
        "distance": max(1 - kernel_alignment(*kernels), 0.0),
        "kappa": _kappa(depth, dim, len(x), int(point["seed"])) / alpha,
    }
    if point["explicit"]:
        path = gradient_flow(
            model,
            Square(),
            x,
            y,
            alpha=alpha,
            times=[horizon(x, depth)],
            rtol=1e-9,
            atol=1e-11,
            tolerance=1e-8,
            keep_params=True,
        )
        assert path.params is not None
        u, v = (1 + path.params[name][-1] / alpha for name in ("u", "v"))
        result["library"] = float((alpha * (u**depth - v**depth) - expected).abs().max())
    return result


@cache
def _kappa(depth: int, dim: int, samples: int, seed: int) -> float:
    """Compute κ at α = 1; since h(w₀) = 0, it is κ/α at other scales."""
    x, y, _ = sparse_problem(dim, SPARSE, samples, seed)
    return relative_scale(net(depth, dim), x, y, starts=4).kappa


def _recovery(point: Params) -> Result:
    """Compute the mean of |β - β*|² over the seeds, for the minimiser of Q_α."""
    errors = []
    for seed in range(int(point["seeds"])):
        dim, sparse, n = (int(point[name]) for name in ("dim", "sparse", "samples"))
        x, y, answer = sparse_problem(dim, sparse, n, 100 + seed)
        found = interpolator(x, y, float(point["alpha"]), depth=int(point["depth"]))
        errors.append(float((found - answer).square().sum()))
    return {"error": float(np.mean(errors))}


def needed(trials: Trials, depth: int) -> tuple[np.ndarray, np.ndarray]:
    """Find the smallest number of samples from which on β* is recovered, for each scale.

    Args:
        trials: All trials.
        depth: The depth D.

    Returns:
        The scales, and the numbers, which are d if no number below d is enough.
    """
    some = trials.where(kind="recovery", depth=depth)
    alphas, counts = np.unique(some.column("alpha")), []
    for alpha in alphas:
        here = some.where(alpha=float(alpha))
        errors, samples = here.column("error"), here.column("samples")
        missed = samples[~(errors <= ENOUGH)]
        later = samples[samples > missed.max()] if len(missed) else samples
        counts.append(float(later.min()) if len(later) else float(here[0].params["dim"]))
    return alphas, np.array(counts)


def medians(trials: Trials, depth: int, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the scales, and the median of a quantity over the seeds."""
    some = trials.where(kind="flow", depth=depth)
    alphas = np.unique(some.column("alpha"))
    return alphas, np.array([np.median(some.where(alpha=float(a)).column(name)) for a in alphas])


def claims(trials: Trials) -> list[Claim]:
    """Check the limit against the minimiser, both ends of the bias, the samples it needs, and the kernel."""
    flows = trials.where(kind="flow")
    checked = [t for t in flows if "library" in t.result]
    library = np.array([float(t.result["library"]) for t in checked])
    deep = ", ".join(str(depth) for depth in sorted({int(t.params["depth"]) for t in checked}))
    ends = {depth: (medians(trials, depth, "l1")[1][0], medians(trials, depth, "l2")[1][-1]) for depth in DEPTHS}
    excess = [first - 1 for first, _ in ends.values()]
    alphas, counts = needed(trials, 2)
    finite = all(np.isfinite(trials.where(kind="recovery").column("error")))
    slopes = []
    for depth in DEPTHS:
        scales, distances = medians(trials, depth, "distance")
        far = (distances > 1e-12) & (distances < 1e-3)  # rounding hides smaller distances
        slopes.append(exponent(scales[far], distances[far]) if far.sum() >= 2 else math.nan)
    kappas, distances = flows.column("kappa"), flows.column("distance")
    lazy, rich = distances[kappas < 0.1], distances[kappas > 10]
    return [
        Claim(
            f"the limit of gradient flow is the minimiser of Q_α within {TOLERANCE:g}, depths 2, 3, 5, every α",
            "Woodworth et al. 2020: the limit minimises Q_α",
            f"{flows.column('error').max():.1e}",
            bool(flows.column("error").max() <= TOLERANCE),
        ),
        Claim(
            f"`gradient_flow` at α ≥ 1 and depth {deep} reaches it within {TOLERANCE:g}",
            "α = λ^D for a start at λ",
            f"{library.max():.1e}",
            bool(library.max() <= TOLERANCE),
        ),
        Claim(
            "α → 0: the ℓ₁ norm is within 5 % of the least; deeper nets are closer to it at the same α",
            "Woodworth et al. 2020: λ exponentially small for D = 2, polynomially for D > 2",
            ", ".join(f"D = {depth}: {100 * each:.2g} %" for depth, each in zip(DEPTHS, excess, strict=True)),
            bool(excess[0] <= 0.05 and excess[0] > excess[1] > excess[2] > -1e-6),
        ),
        Claim(
            "α → ∞: the ℓ₂ norm is the least within 0.0001 %",
            "Woodworth et al. 2020: the kernel regime",
            ", ".join(f"D = {depth}: {100 * (last - 1):.1g} %" for depth, (_, last) in ends.items()),
            all(abs(last - 1) <= 1e-6 for _, last in ends.values()),
        ),
        Claim(
            "samples that recover a sparse β*: never fewer as α grows, and at most half at the smallest α",
            "Woodworth et al. 2020: r log d for small α, d for large α",
            ", ".join(f"α = {a:g}: {int(n)}" for a, n in zip(alphas, counts, strict=True)),
            bool(finite and (np.diff(counts) >= 0).all() and 2 * counts[0] <= counts[-1]),
        ),
        Claim(
            "the kernel distance 1 - cos falls like α^s, s = -4 ± 0.05",
            "u = v at the start: terms of order 1/α of the kernel cancel",
            "; ".join(f"s = {against(each, -4)}" for each in slopes),
            all(abs(each + 4) <= 0.05 for each in slopes),
        ),
        Claim(
            "κ < 0.1: the kernel distance is below 0.001; κ > 10: it is above 0.05",
            "κ = 1 separates the regimes",
            f"at most {lazy.max(initial=0):.1e}, at least {rich.min(initial=1):.2f}",
            bool(len(lazy) and len(rich) and lazy.max() < 1e-3 and rich.min() > 0.05),
        ),
    ]


def figure(trials: Trials) -> Figure:
    """Draw the two norms, the kernel distance, the samples that are needed, and the error of the closed form."""
    page, axes = panels(2, 2, width=4.4, height=3.1)
    norms, kernel, samples, errors = axes.flat
    for depth, colour in zip(DEPTHS, COLOURS, strict=False):
        norms.plot(*medians(trials, depth, "l1"), "o-", ms=3, color=colour, label=f"$D={depth}$")
        norms.plot(*medians(trials, depth, "l2"), "s:", ms=3, color=colour)
        kernel.plot(*medians(trials, depth, "distance"), "o-", ms=3, color=colour, label=f"$D={depth}$")
        errors.plot(*medians(trials, depth, "error"), "o-", ms=3, color=colour, label=f"$D={depth}$")
    norms.plot([], [], "ko-", ms=3, label=r"$\ell_1$")
    norms.plot([], [], "ks:", ms=3, label=r"$\ell_2$")
    norms.set(title="limit of the flow", ylabel="norm / least norm", xscale="log")
    _, kappas = medians(trials, 2, "kappa")
    scales = medians(trials, 2, "kappa")[0]
    one = float(np.exp(np.interp(0, np.log(kappas[::-1]), np.log(scales[::-1]))))
    kernel.axvline(one, color=BLACK, lw=0.8, ls="--", label=r"$\kappa=1$ ($D=2$)")
    kernel.set(title="kernel", ylabel="distance of start and end", xscale="log", yscale="log")
    kernel.set_ylim(bottom=1e-14)
    for depth, colour in zip(DEPTHS, COLOURS, strict=False):
        if len(trials.where(kind="recovery", depth=depth)):
            samples.plot(*needed(trials, depth), "o-", ms=3, color=colour, label=f"$D={depth}$")
    samples.set(title=r"recovery of $\beta^*$", ylabel="samples needed", xscale="log")
    samples.set_ylim(bottom=0)
    errors.axhline(TOLERANCE, color=BLACK, lw=0.8, ls="--", label="tolerance")
    errors.set(title=r"closed form: minimiser of $Q_\alpha$", ylabel="distance from the limit", xscale="log")
    errors.set(yscale="log")
    for axis in axes.flat:
        axis.set_xlabel(r"scale $\alpha$ of the start")
        axis.legend()
    return page


EXPERIMENT = Experiment(
    name="diagonal",
    source="Woodworth, Gunasekar, Lee, Moroshko, Savarese, Golan, Soudry, Srebro 2020",
    title="Diagonal linear nets: from the ℓ₁ norm to the ℓ₂ norm as α grows",
    caption=(
        "A linear model whose weights are differences of powers of degree D is trained from starts of different scale."
        " A small start finds the sparse solution of smallest ℓ₁ norm, a large one the lazy solution of smallest"
        " ℓ₂ norm, and a closed form gives every case between."
    ),
    cost={"quick": "5 s on two cores", "paper": "8 min on two cores"},
    grid=grid,
    trial=trial,
    figure=figure,
    claims=claims,
)
