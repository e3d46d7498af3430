"""Theorems 2.2–2.5 and the lemmas: every bound, with its constants, compared with the measured flows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import normalize

from lazyscope.certify.certificates import certify
from lazyscope.certify.comparison import compare, compare_steps
from lazyscope.flow.ode import gradient_flow
from lazyscope.lab.experiment import Claim, Experiment, Params, Result, Trials
from lazyscope.lab.style import BLACK, BLUE, GREEN, ORANGE, PURPLE, RED, panels
from lazyscope.loss import Square
from lazyscope.model.two_layer import TwoLayer
from lazyscope.problem.random_problem import RandomProblem
from lazyscope.theory.constant_rank import descent, under_parameterised
from lazyscope.theory.constants import TwoLayerConstants
from lazyscope.theory.convergence import Decay, over_parameterised
from lazyscope.theory.lazy import finite_horizon

COLOURS = (BLUE, ORANGE, GREEN, RED, PURPLE)

LEAST = 1e-8
"""The least ratio in the figure; smaller ones are drawn there, with another mark."""
THEOREMS = ("Theorem 2.2", "Theorem 2.3", "Theorem 2.4", "Theorem 2.5", "Lemma B.1", "Lemma B.2", "Gradient descent")
QUANTITIES = ("outputs", "displacement", "weights", "weights_tight", "unseen")
"""The quantities that Theorem 2.3, Lemma B.2 and Proposition A.1 bound."""

TIMES = 40


def grid(scale: str) -> list[Params]:
    """List random problems, one net over α and K, over-parameterised nets, and under-parameterised nets over α."""
    paper = scale == "paper"
    count, alphas, ks = (500, np.geomspace(1, 1e4, 9), (0.5, 2.0, 8.0)) if paper else (6, (1.0, 100.0), (0.5, 4.0))
    points: list[Params] = [{"part": "random", "seed": seed} for seed in range(count)]
    points += [{"part": "horizon", "alpha": float(a), "K": k} for k in ks for a in alphas]
    points += [{"part": "over", "seed": seed} for seed in range(5 if paper else 1)]
    return points + [{"part": "under", "alpha": a} for a in ((10.0, 30.0, 100.0, 1000.0) if paper else (1000.0,))]


def trial(points: list[Params], device: torch.device) -> list[Result]:
    """Measure the points on the CPU, whatever the device, since the problems are small and in float64."""
    parts = {"random": _random, "horizon": _horizon, "over": _over, "under": _under}
    return [parts[str(point["part"])](point) for point in points]


def _random(point: Params) -> Result:
    """Compute all certificates of a random problem."""
    p = RandomProblem.draw(int(point["seed"]))
    told: dict[str, Any] = {"alpha": p.alpha, "K": p.K, "centred": p.centred, "lr": p.lr, "steps": 60}
    found = certify(p.model, p.loss, p.x, p.y, unseen=p.unseen, constants=p.constants, points=6, **told)
    tight = [max((m.ratio for m in c.measurements), default=math.nan) for c in found]
    return {
        "names": np.array([c.name for c in found]),
        "verdicts": np.array([str(c.verdict) for c in found]),
        "ratios": np.array(tight),
        "words": p.words,
    }


def _net(width: int, dim: int, n: int, seed: int, tau: float = 1.0) -> tuple[TwoLayer, Tensor, Tensor]:
    """Draw a net with sine activation, points on the sphere and Gaussian targets."""
    random = torch.Generator().manual_seed(seed)
    net = TwoLayer.gaussian(width, dim, [seed], tau=tau, activation=torch.sin)[0].to(torch.float64)
    x = normalize(torch.randn(n, dim, generator=random, dtype=torch.float64), dim=1)
    return net, x, torch.randn(n, generator=random, dtype=torch.float64)


def _horizon(point: Params) -> Result:
    """Apply Theorem 2.3 to one net: bounds and distances at T = K/Lip(h)²."""
    net, x, y = _net(20, 4, 8, 0)
    options = {"alpha": float(point["alpha"]), "centred": True}
    certificate = finite_horizon(net, x, y, K=float(point["K"]), unseen=-x, **options)  # type: ignore[arg-type]
    times = torch.linspace(0, certificate.horizon, 12, dtype=torch.float64)
    both = compare(net, Square(), x, y, times=times, unseen=-x, **options)  # type: ignore[arg-type]
    result: Result = {"holds": certificate.against(both).holds}
    for bound in certificate.bounds:
        name = bound.quantity + ("_tight" if "1/2" in bound.statement else "")
        result[f"{name}_bound"] = float(bound.curve(times[-1:])[0])
        result[name] = float(getattr(both, bound.quantity)[-1])
    return result


def _over(point: Params) -> Result:
    """Apply Theorem 2.4 just above its threshold α = ‖y*‖/C₀: the decrease of the loss, and its rate."""
    net, x, y = _net(40, 5, 3, int(point["seed"]))
    constants = TwoLayerConstants(net, x)
    options = {"centred": True, "constants": constants}
    least = over_parameterised(net, Square(), x, y, alpha=1.0, **options).constants  # type: ignore[arg-type]
    alpha = 1.01 * least["‖y*‖"].value / least["C₀"].value
    certificate = over_parameterised(net, Square(), x, y, alpha=alpha, **options)  # type: ignore[arg-type]
    rate = certificate.constants["rate mσ_min²/4"].value
    times = torch.linspace(0, 2 / rate, TIMES, dtype=torch.float64)
    both = compare(net, Square(), x, y, alpha=alpha, times=times, centred=True)
    checked = certificate.against(both)
    return {
        "holds": checked.holds,
        "alpha": alpha,
        "rate": rate,
        "measured_rate": Decay.of(both).rate,
        "times": times.numpy(),
        "residual": both.residual.numpy(),
        "bound": certificate.bounds[0].curve(times).numpy(),
        "ratios": np.array([m.ratio for m in checked.measurements]),
    }


def _under(point: Params) -> Result:
    """Apply Theorem 2.5 with fewer parameters than points.

    The net is the best conditioned of 20 draws, because the ODE solver is explicit.
    """
    alpha = float(point["alpha"])
    draws = [_net(2, 3, 16, seed, tau=3.0) for seed in range(20)]
    net, x, y = min(draws, key=lambda draw: _condition(draw[0], draw[1]))
    eigenvalues = _spectrum(net, x)
    times = torch.linspace(0, 15 / float(eigenvalues[0]), TIMES, dtype=torch.float64)
    both = compare(net, Square(), x, y, alpha=alpha, times=times, centred=True)
    certificate = under_parameterised(net, Square(), x, y, alpha=alpha, centred=True).against(both)
    lr = 1 / float(eigenvalues[-1])
    stepped = descent(net, Square(), x, y, alpha=alpha, lr=lr, centred=True)
    walked = compare_steps(net, Square(), x, y, alpha=alpha, lr=lr, steps=400, centred=True)
    found = (certificate, stepped.against(walked))
    decay = Decay.of(both)
    return {
        "verdicts": np.array([str(c.verdict) for c in found]),
        "ratios": np.array([max((m.ratio for m in c.measurements), default=math.nan) for c in found]),
        "rate": decay.rate,
        "tangent_rate": float(eigenvalues[0]),
        "r_squared": decay.r_squared,
        "left": decay.left,
        "loss": float(both.loss[-1] / both.loss[0]),
        "curvature": _least_curvature(net, x, y, alpha, float(times[-1])),
        "times": times.numpy(),
        "gradient": (both.gradient / both.gradient[0]).numpy(),
    }


def _spectrum(net: TwoLayer, x: Tensor) -> Tensor:
    """Compute the positive eigenvalues of Σ(w₀), one per parameter."""
    eigenvalues: Tensor = torch.linalg.eigvalsh(net.coordinates(x, centred=True).kernel() / len(x))
    return eigenvalues[-(net.a.numel() + net.b.numel()) :]


def _condition(net: TwoLayer, x: Tensor) -> float:
    eigenvalues = _spectrum(net, x)
    return float(eigenvalues[-1] / eigenvalues[0])


def _least_curvature(net: TwoLayer, x: Tensor, y: Tensor, alpha: float, end: float) -> float:
    """Compute the smallest eigenvalue of the Hessian of v ↦ R(y_α(v)) at the end of the flow.

    It is positive at a strict minimum.
    """
    options = {"alpha": alpha, "centred": True, "times": [end], "keep_params": True, "rtol": 1e-9, "atol": 1e-12}
    path = gradient_flow(net, Square(), x, y, tolerance=0.0, **options)  # type: ignore[arg-type]
    assert path.params is not None
    a, b = (path.params[name][-1] for name in ("a", "b"))
    coordinates = net.coordinates(x, alpha, centred=True)

    def risk(v: Tensor) -> Tensor:
        outputs = coordinates.outputs({"a": v[: a.numel()].view_as(a), "b": v[a.numel() :].view_as(b)})
        return Square()(outputs, y)

    hessian = torch.autograd.functional.hessian(risk, torch.cat([a.flatten(), b.flatten()]))
    return float(torch.linalg.eigvalsh(hessian)[0])


def judged(random: Trials, name: str) -> list[tuple[str, float]]:
    """Return the verdict on each random problem, and the largest ratio of a measurement to its bound."""
    columns = ("names", "verdicts", "ratios")
    rows = (row for t in random for row in zip(*(np.asarray(t.result[c]) for c in columns), strict=True))
    return [(str(verdict), float(ratio)) for found, verdict, ratio in rows if str(found) == name]


def claims(trials: Trials) -> list[Claim]:
    """Check that no bound is violated, and that the measured rates agree with the theorems."""
    random, horizon = trials.where(part="random"), trials.where(part="horizon")
    over, under = trials.where(part="over"), trials.where(part="under")
    found = []
    for name in THEOREMS:
        every = judged(random, name)
        used = [ratio for verdict, ratio in every if verdict != "does not apply"]
        worst = max(used, default=0.0, key=lambda ratio: math.inf if math.isnan(ratio) else ratio)
        found.append(
            Claim(
                f"{name}: never violated on {len(random)} random problems, and it applies to some of them",
                "documentation, proofs" if name in ("Theorem 2.5", "Gradient descent") else "supplement, A.3 and B",
                f"applies to {len(used)} of {len(every)}; measured/bound is at most {worst:.3f}",
                len(used) > 0 and worst <= 1,
            )
        )
    most = max(float((horizon.column(q) / horizon.column(f"{q}_bound")).max()) for q in QUANTITIES)
    most = max(most, *(float(np.max(np.asarray(t.result["ratios"]))) for t in over))
    least = float((over.column("measured_rate") / over.column("rate")).min())
    r_squared, left = float(under.column("r_squared").min()), float(under.column("left").max())
    alphas = under.column("alpha")
    drift = float(abs(under.column("rate") / under.column("tangent_rate") - 1)[alphas == alphas.max()].max())
    proved = under.where(alpha=float(alphas.max()))
    verdicts = {str(verdict) for t in proved for verdict in np.asarray(t.result["verdicts"])}
    closest = max(float(np.max(np.asarray(t.result["ratios"]))) for t in proved)
    rest, curvature = float(under.column("loss").min()), float(under.column("curvature").min())
    return [
        *found,
        Claim(
            "all bounds hold for all α and K, and just above the threshold of Theorem 2.4",
            "Thm 2.3, 2.4, B.2, Prop. A.1",
            f"measured/bound is at most {most:.2f}",
            most <= 1,
        ),
        Claim("over-parameterised: rate ≥ mσ²_min/4", "Thm 2.4", f"{least:.2f} times that", least >= 1),
        Claim(
            "under-parameterised: log-linear decay, R² ≥ 0.999", "Thm 2.5", f"R² = {r_squared:.4f}", r_squared >= 0.999
        ),
        Claim(
            "its rate tends to that of the tangent model (within 0.5 %)", "Thm 2.5", f"{drift:.2%} off", drift <= 0.005
        ),
        Claim(
            "at the largest α, Theorem 2.5 with its constants and gradient descent apply, and their bounds hold",
            "Thm 2.5; documentation, proofs",
            f"{', '.join(sorted(verdicts))}; measured/bound is at most {closest:.2f}",
            verdicts == {"holds"} and closest <= 1,
        ),
        Claim(
            "its limit has positive loss, zero gradient and positive curvature",
            "Thm 2.5: a local minimum",
            f"loss {rest:.2f}, gradient {left:.0e}, curvature {curvature:.1e}",
            rest > 0.01 and left < 1e-5 and curvature > 0,
        ),
    ]


def figure(trials: Trials) -> Figure:
    """Draw Theorem 2.3 over α and K, Theorems 2.4 and 2.5 in time, and measured/bound for the random problems."""
    page, axes = panels(2, 2, width=4.6, height=3.5)
    _draw_horizon(axes[0, 0], trials.where(part="horizon"))
    _draw_over(axes[0, 1], trials.where(part="over"))
    _draw_under(axes[1, 0], trials.where(part="under"))
    _draw_random(axes[1, 1], trials.where(part="random"))
    return page


def _draw_horizon(axis: Axes, trials: Trials) -> None:
    for colour, k in zip(COLOURS, np.unique(trials.column("K")), strict=False):
        some = trials.where(K=float(k))
        axis.plot(some.column("alpha"), some.column("outputs"), "-o", color=colour, label=f"measured, $K={k:g}$")
        axis.plot(some.column("alpha"), some.column("outputs_bound"), "--", color=colour)
    axis.plot([], [], "--", color=BLACK, label="their bounds")
    axis.set(xscale="log", yscale="log", title=r"Theorem 2.3: at $T=K/\mathrm{Lip}(h)^2$", xlabel=r"scale $\alpha$")
    axis.set(ylabel=r"$\|\alpha h-\alpha\bar h\|$", ylim=(axis.get_ylim()[0] / 300, None))
    axis.legend(loc="lower left")


def _draw_over(axis: Axes, trials: Trials) -> None:
    for trial_ in trials:
        r = {name: np.asarray(value) for name, value in trial_.result.items()}
        seed = int(trial_.params["seed"])
        colour, start = COLOURS[seed % len(COLOURS)], r["residual"][0]
        axis.plot(r["times"] * r["rate"], r["residual"] / start, ".-", color=colour, ms=3, label=f"seed {seed}")
    axis.plot(r["times"] * r["rate"], r["bound"] / start, "--", color="0.25", label="bound, all seeds")
    axis.set(yscale="log", title="Theorem 2.4: over-parameterised", xlabel=r"time $m\sigma^2_{\min}t/4$")
    axis.set(ylabel=r"$\|\alpha h-y^*\|$ / initial")
    axis.legend(loc="lower left")


def _draw_under(axis: Axes, trials: Trials) -> None:
    many = len(trials)
    for i, trial_ in enumerate(trials):  # the curves coincide, and thinner ones on top leave the others visible
        r = {name: np.asarray(value) for name, value in trial_.result.items()}
        label = rf"$\alpha={trial_.params['alpha']:g}$: rate {r['rate'] / r['tangent_rate']:.3f} $\sigma^2_+$"
        look: dict[str, Any] = {"lw": 1 + 1.4 * (many - 1 - i), "color": COLOURS[i % len(COLOURS)]}
        axis.plot(r["times"] * r["tangent_rate"], r["gradient"], **look, label=label)
    axis.set(yscale="log", title="Theorem 2.5: under-parameterised", xlabel=r"time $\sigma^2_{+}t$")
    axis.set(ylabel=r"$\|\nabla F_\alpha\|$ / initial")
    axis.legend(loc="upper right")


def _draw_random(axis: Axes, trials: Trials) -> None:
    for height, name in enumerate(THEOREMS):
        used = np.array([ratio for verdict, ratio in judged(trials, name) if verdict in ("holds", "violated")])
        axis.plot(used[used >= LEAST], np.full((used >= LEAST).sum(), height), "|", color=BLUE, ms=6, alpha=0.6)
        axis.plot(np.full((used < LEAST).sum(), LEAST), np.full((used < LEAST).sum(), height), "<", color=BLUE, ms=4)
    axis.axvline(1, color=RED, ls="--", label="bound")
    axis.set(xscale="log", title="random problems", xlabel=r"measured/bound ($\triangleleft$: below $10^{-8}$)")
    axis.set(ylim=(-0.6, len(THEOREMS) - 0.4), xlim=(LEAST / 3, 6))
    axis.set_yticks(range(len(THEOREMS)), THEOREMS)
    axis.legend(loc="upper left")


EXPERIMENT = Experiment(
    name="certificates",
    source="Chizat, Oyallon, Bach 2019, Theorems 2.2–2.5; supplement, B.1–B.5",
    title="Every theorem as a certificate",
    caption=(
        "Each theorem on lazy training bounds how far a network is from its tangent model. On random problems the"
        " measured distance is compared with the bound, with all constants computed: a ratio above 1 would"
        " contradict the theorem."
    ),
    cost={"quick": "30 s on two cores", "paper": "15 min on two cores"},
    grid=grid,
    trial=trial,
    figure=figure,
    claims=claims,
    chunk=1,
)
