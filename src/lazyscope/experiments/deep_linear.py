"""Deep linear nets: exact trajectories, from sigmoidal and feature learning to exponential and lazy as |λ| grows.

The inputs are whitened, so that `theory.deep_linear` has the trajectories in closed form. A start is λ-balanced if
W₂ᵀW₂ - W₁W₁ᵀ = λI: for large |λ| one layer is large and hardly has to move. The last part starts from small Gaussian
weights and ordinary inputs: the kernel turns towards its final direction before the loss falls (silent alignment).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter
from torch import Tensor

from lazyscope.diagnose.drift import kernel_alignment
from lazyscope.flow.ode import gradient_flow
from lazyscope.flow.tangent import tangent_flow
from lazyscope.lab.experiment import Claim, Experiment, Params, Result, Trials
from lazyscope.lab.fit import against, exponent
from lazyscope.lab.style import BLACK, BLUE, COLOURS, ORANGE, panels
from lazyscope.loss import Square
from lazyscope.model.base import Model
from lazyscope.tangent.kernel import tangent_kernel
from lazyscope.theory.deep_linear import balanced_start, mode_flow, two_layer_flow
from lazyscope.theory.relative_scale import relative_scale

TOLERANCE = 1e-6
SIZE, PRODUCT, TIMES = 3, 0.05, 16
"""The size of the square layers, the singular values of W₂W₁ at the start, and the number of recorded times."""
DEPTHS = (2, 3, 5)
STRENGTHS = (2.0, 1.0)
"""The singular values of the target of the modes."""
DIM, POINTS, HIDDEN, UNSEEN = 8, 5, 16, 20


def grid(scale: str) -> list[Params]:
    """List the λ-balanced starts, the depths and the scales of Gaussian starts."""
    paper = scale == "paper"
    far = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
    signed = (*(-each for each in far[::-1]), 0.0, *far) if paper else (-30.0, -10.0, 0.0, 10.0, 30.0)
    points: list[Params] = [
        {"kind": "balance", "balance": each, "seed": seed} for seed in range(5 if paper else 1) for each in signed
    ]
    points += [{"kind": "depth", "depth": depth} for depth in (DEPTHS if paper else DEPTHS[:2])]
    sizes = (1e-4, 1e-3, 1e-2, 0.1, 0.3, 1.0) if paper else (0.01, 1.0)
    return points + [
        {"kind": "silent", "size": size, "seed": seed} for seed in range(5 if paper else 1) for size in sizes
    ]


def trial(points: list[Params], device: torch.device) -> list[Result]:
    """Integrate a flow and compare it with its closed form; all are small and run on the CPU."""
    return [{"balance": _balance, "depth": _depth, "silent": _silent}[str(point["kind"])](point) for point in points]


def linear_net(layers: list[Tensor]) -> Model:
    """Build the linear network x ↦ W_L … W_1 x.

    Args:
        layers: The weights W_1, …, W_L at the start.

    Returns:
        The model.
    """

    def forward(w: Mapping[str, Tensor], x: Tensor) -> Tensor:
        for name in sorted(w):
            x = x @ w[name].mT
        return x

    return Model(forward, {f"w{i}": w for i, w in enumerate(layers, 1)})


def whitened(size: int) -> Tensor:
    """Return inputs with XᵀX/n = I: the rows of √n I."""
    return torch.eye(size, dtype=torch.float64).mul(math.sqrt(size))


def target(seed: int) -> Tensor:
    """Draw a target Σ with singular values 3, 2 and 1."""
    random = torch.Generator().manual_seed(1000 + seed)
    left, right = torch.linalg.qr(torch.randn(2, SIZE, SIZE, generator=random, dtype=torch.float64)).Q
    found: Tensor = left @ torch.diag(torch.arange(SIZE, 0, -1, dtype=torch.float64)) @ right
    return found


def _balance(point: Params) -> Result:
    """Compare the flow from a λ-balanced start with its closed form and with the tangent flow."""
    balance, seed = float(point["balance"]), int(point["seed"])
    w1, w2 = balanced_start(SIZE, balance, PRODUCT, seed=seed)
    wanted, x = target(seed), whitened(SIZE)
    y, model = x @ wanted.T, linear_net([w1, w2])
    # A mode of strength σ grows at the rate √(λ² + 4σ²), from 2σ for λ = 0 to |λ| in the lazy limit.
    rate = math.hypot(balance, 2.0)
    times = torch.linspace(0, 12 / rate, TIMES, dtype=torch.float64)
    path = gradient_flow(model, Square(), x, y, times=times, rtol=1e-8, atol=1e-10, tolerance=0.0)
    line = tangent_flow(model, Square(), x, y, times=times)
    curve = x @ two_layer_flow(w1, w2, wanted, times.tolist()).product.mT
    late, fine = two_layer_flow(w1, w2, wanted, [50.0]), np.linspace(0, 10, 101)
    kernels = [_kernel(w1.T @ w1, w2 @ w2.T), _kernel(late.first[0], late.second[0])]
    smooth = two_layer_flow(w1, w2, wanted, (fine / rate).tolist()).product
    return {
        "error": float((path.outputs - curve).abs().max()),
        "kernel_error": float((tangent_kernel(model, x) - kernels[0]).abs().max()),
        "deviation": float((curve - line.outputs).flatten(1).norm(dim=1).max() / y.norm()),
        "distance": max(1 - kernel_alignment(*kernels), 0.0),
        "kappa": relative_scale(model, x, y, starts=2).kappa,
        "times": fine,
        "loss": (smooth - wanted).flatten(1).square().sum(1).numpy() / float(wanted.square().sum()),
    }


def _kernel(first: Tensor, second: Tensor) -> Tensor:
    """The tangent kernel xᵀW₁ᵀW₁x'·I + x·x' W₂W₂ᵀ on the whitened inputs, (n, n, k, k)."""
    eye = torch.eye(SIZE, dtype=first.dtype)
    return SIZE * (torch.einsum("ij,kl->ijkl", first, eye) + torch.einsum("ij,kl->ijkl", eye, second))


def _depth(point: Params) -> Result:
    """Compare the flow of a deep net from an aligned, balanced start with that of its modes."""
    depth, d = int(point["depth"]), len(STRENGTHS)
    random = torch.Generator().manual_seed(depth)
    bases = torch.linalg.qr(torch.randn(depth + 1, d, d, generator=random, dtype=torch.float64)).Q
    layers = [PRODUCT ** (1 / depth) * bases[i + 1] @ bases[i].T for i in range(depth)]
    wanted, x = bases[-1] @ torch.diag(torch.tensor(STRENGTHS, dtype=torch.float64)) @ bases[0].T, whitened(d)
    times = torch.linspace(0, 6, TIMES, dtype=torch.float64)
    path = gradient_flow(
        linear_net(layers), Square(), x, x @ wanted.T, times=times, rtol=1e-8, atol=1e-10, tolerance=0.0
    )
    products = path.outputs.mT / math.sqrt(d)  # rows of x are √n e_i
    modes = (bases[-1].T @ products @ bases[0]).diagonal(dim1=1, dim2=2)
    fine = torch.linspace(0, 6, 3 * (TIMES - 1) + 1, dtype=torch.float64)
    exact = torch.stack([mode_flow(PRODUCT, strength, depth, fine.tolist()) for strength in STRENGTHS], 1)
    return {"error": float((modes - exact[::3]).abs().max()), "times": fine.numpy(), "modes": exact.numpy()}


def _silent(point: Params) -> Result:
    """Measure when the kernel turns, and compare the end with regression by the final kernel."""
    size, random = float(point["size"]), torch.Generator().manual_seed(int(point["seed"]))
    inputs = torch.randn(POINTS + UNSEEN, DIM, generator=random, dtype=torch.float64)
    x, unseen = inputs[:POINTS], inputs[POINTS:]
    y = x @ torch.randn(DIM, 1, generator=random, dtype=torch.float64) / math.sqrt(DIM)
    first = size * torch.randn(HIDDEN, DIM, generator=random, dtype=torch.float64) / math.sqrt(DIM)
    second = size * torch.randn(1, HIDDEN, generator=random, dtype=torch.float64) / math.sqrt(HIDDEN)
    model = linear_net([first, second])
    times = torch.linspace(0, 20 + 4 * math.log(1 / size), 61, dtype=torch.float64)
    path = gradient_flow(model, Square(), x, y, times=times, tolerance=1e-6, rtol=1e-7, keep_params=True)
    assert path.params is not None
    moves = path.params
    w = [{name: start + moves[name][t] for name, start in model.params.items()} for t in range(len(times))]
    kernels = [_scalar_kernel(each, x, x) for each in w]
    fitted = model.at(w[-1])(unseen) - model(unseen)
    regressed = _scalar_kernel(w[-1], unseen, x) @ torch.linalg.solve(kernels[-1], y - model(x))
    losses = path.loss.numpy() / float(path.loss[0])
    turned = np.array([kernel_alignment(each, kernels[-1]) for each in kernels])
    early = int(np.argmax(losses <= 0.9))
    return {
        "times": times.numpy(),
        "loss": losses,
        "alignment": turned,
        "turned": float((turned[early] - turned[0]) / (1 - turned[0])) if losses[early] <= 0.9 else math.nan,
        "growth": float(kernels[-1].norm() / kernels[early].norm()),
        "regression": float((fitted - regressed).norm() / regressed.norm()),
    }


def _scalar_kernel(w: dict[str, Tensor], a: Tensor, b: Tensor) -> Tensor:
    """The tangent kernel of a two-layer linear net with one output; a test compares it with `tangent_kernel`."""
    return (a @ w["w1"].T) @ (b @ w["w1"].T).T + w["w2"].square().sum() * a @ b.T


def medians(trials: Trials, kind: str, of: str, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the values of a parameter, and the median of a quantity over the seeds."""
    some = trials.where(kind=kind)
    values = np.unique(some.column(of))
    return values, np.array([np.median(some.where(**{of: float(v)}).column(name)) for v in values])


def slope(trials: Trials, name: str, sign: int) -> float:
    """Fit the exponent in |λ| of a quantity, for |λ| ≥ 10 of one sign."""
    balances, values = medians(trials, "balance", "balance", name)
    far = sign * balances >= 10
    return exponent(np.abs(balances[far]), values[far])


def claims(trials: Trials) -> list[Claim]:
    """Check the closed forms, the lazy limit in λ, and silent alignment."""
    balanced, deep = trials.where(kind="balance"), trials.where(kind="depth")
    depths = ", ".join(str(each) for each in deep.column("depth"))
    worst = max(balanced.column("error").max(), balanced.column("kernel_error").max())
    slopes = {name: [slope(trials, name, sign) for sign in (-1, 1)] for name in ("deviation", "kappa")}
    (zero,) = [v for b, v in zip(*medians(trials, "balance", "balance", "distance"), strict=True) if b == 0]
    balances, distances = medians(trials, "balance", "balance", "distance")
    last = float(distances[np.abs(balances) == np.abs(balances).max()].max())
    _, turned = medians(trials, "silent", "size", "turned")
    _, regression = medians(trials, "silent", "size", "regression")
    _, growth = medians(trials, "silent", "size", "growth")
    return [
        Claim(
            f"λ-balanced starts: the closed form is the flow of `gradient_flow` within {TOLERANCE:g}",
            "Braun et al. 2022; Dominé et al. 2024",
            f"{worst:.1e}",
            bool(worst <= TOLERANCE),
        ),
        Claim(
            f"aligned starts of depth {depths}: each mode is the closed form within {TOLERANCE:g}",
            "Saxe et al. 2014",
            f"{deep.column('error').max():.1e}",
            bool(deep.column("error").max() <= TOLERANCE),
        ),
        Claim(
            "the deviation from the tangent flow falls like |λ|^s, s = -2 ± 0.1, for both signs",
            "Dominé et al. 2024: λ → ±∞ is lazy; the layers move by |λ|^(-1/2) and |λ|^(-3/2), and h is bilinear",
            "; ".join(f"s = {against(each, -2)}" for each in slopes["deviation"]),
            all(abs(each + 2) <= 0.1 for each in slopes["deviation"]),
        ),
        Claim(
            "κ falls like |λ|^s, s = -1 ± 0.005",
            "‖Dh‖² grows like |λ|, D²h is constant",
            "; ".join(f"s = {against(each, -1, 4)}" for each in slopes["kappa"]),
            all(abs(each + 1) <= 0.005 for each in slopes["kappa"]),
        ),
        Claim(
            "the kernel distance of start and end is at least 100 times smaller at the largest |λ| than at λ = 0",
            "Dominé et al. 2024",
            f"{zero:.2f} and {last:.1e}",
            bool(100 * last <= zero),
        ),
        Claim(
            "smallest start: when the loss has fallen by 10 %, the kernel has turned 75 % of the way to its limit,"
            " and its norm still grows at least twofold",
            "Atanasov et al. 2022: silent alignment",
            f"{100 * turned[0]:.0f} %, {growth[0]:.1f} times",
            bool(turned[0] >= 0.75 and growth[0] >= 2),
        ),
        Claim(
            "smallest start: the limit is regression with the final kernel within 1 %; largest start: over 5 % off",
            "Atanasov et al. 2022: a kernel machine with the final kernel",
            f"{100 * regression[0]:.2g} % and {100 * regression[-1]:.2g} %",
            bool(regression[0] <= 0.01 and regression[-1] > 0.05),
        ),
    ]


def figure(trials: Trials) -> Figure:
    """Draw the losses for several λ, the deviation against λ, the modes, and silent alignment."""
    page, axes = panels(2, 2, width=4.4, height=3.1)
    curves, lazy, modes, silent = axes.flat
    shown = [t for t in trials.where(kind="balance", seed=0) if float(t.params["balance"]) >= 0]
    for run, colour in zip(shown, COLOURS, strict=False):
        curves.plot(
            np.asarray(run.result["times"]),
            np.asarray(run.result["loss"]),
            color=colour,
            label=rf"$\lambda={float(run.params['balance']):g}$",
        )
    curves.set(title="λ-balanced starts", xlabel=r"time $t\,\sqrt{\lambda^2+4}$", ylabel="loss / that of 0")
    curves.set_xlim(0, 10)
    for name, label, colour in (
        ("deviation", "deviation from the tangent flow", BLUE),
        ("distance", "kernel distance", ORANGE),
        ("kappa", r"$\kappa$", BLACK),
    ):
        balances, values = medians(trials, "balance", "balance", name)
        for sign, mark in ((1, "o-"), (-1, "s:")):
            side = sign * balances > 0
            lazy.plot(np.abs(balances[side]), values[side], mark, ms=3, color=colour, label=label if sign > 0 else None)
    lazy.set(title="from rich to lazy", xlabel=r"$|\lambda|$ (dotted: $\lambda<0$)", xscale="log", yscale="log")
    lazy.set(ylabel="median over the seeds", ylim=(lazy.get_ylim()[0] / 30, None))
    lazy.xaxis.set_minor_formatter(NullFormatter())
    for run, colour in zip(trials.where(kind="depth"), COLOURS, strict=False):
        lines = modes.plot(np.asarray(run.result["times"]), np.asarray(run.result["modes"]), color=colour)
        lines[0].set_label(f"$L={run.params['depth']}$")
    modes.set(title="modes of an aligned start", xlabel="time", ylabel="singular value")
    runs = trials.where(kind="silent", seed=0)
    for run, colour in zip(runs, COLOURS, strict=False):
        times = np.asarray(run.result["times"])
        silent.plot(times, np.asarray(run.result["loss"]), ":", color=colour)
        silent.plot(
            times, np.asarray(run.result["alignment"]), color=colour, label=f"start {float(run.params['size']):g}"
        )
    silent.set(title="silent alignment", xlabel="time", ylabel="kernel with its limit", xlim=(0, 10), ylim=(0, 1.05))
    silent.plot([], [], ":", color="0.3", label="loss")
    for axis in axes.flat:
        axis.legend()
    return page


EXPERIMENT = Experiment(
    name="deep-linear",
    source="Saxe et al. 2014; Atanasov et al. 2022; Braun et al. 2022; Dominé et al. 2024",
    title="Deep linear nets: exact trajectories from feature learning to lazy training",
    caption=(
        "Linear nets of two and more layers have exact trajectories, which the integrated flow follows. How"
        " unequal the layers are at the start decides between lazy and rich learning."
    ),
    cost={"quick": "8 s on two cores", "paper": "3 min on two cores"},
    grid=grid,
    trial=trial,
    figure=figure,
    claims=claims,
)
