"""Figure 6 of the supplement: the cover figure with two hundred neurons, and the effect of a nonzero initial output."""

from __future__ import annotations

from matplotlib.figure import Figure

from lazyscope.experiments.cover import DRAWN, compare, draw, explain, median, trial, typical
from lazyscope.lab.experiment import Claim, Experiment, Params, Trials
from lazyscope.lab.style import panels

PANELS = (
    ("Non-lazy, $\\tau = 0.1$", {"tau": 0.1, "symmetrised": True}),
    ("Lazy, $\\tau = 2$, not symmetrised", {"tau": 2.0, "symmetrised": False}),
    ("Lazy, $\\tau = 2$, symmetrised", {"tau": 2.0, "symmetrised": True}),
)


def grid(scale: str) -> list[Params]:
    """List the three panels; `quick` has 60 points, 60 neurons, and fewer but larger steps."""
    quick: Params = {"train": 60, "width": 60, "steps": 10_000, "lr": 0.03}
    paper: Params = {"train": 200, "width": 200, "steps": 100_000, "lr": 0.005}
    size = quick if scale == "quick" else paper
    return [{**panel, "seed": seed, **size} for seed in range(DRAWN - 2, DRAWN + 3) for _, panel in PANELS]


def figure(trials: Trials) -> Figure:
    """Draw one panel per initialisation, for a typical seed."""
    canvas, axes = panels(1, 3, width=3.4, height=3.8)
    seed = typical(trials.where(**PANELS[0][1]))
    for axis, (title, panel) in zip(axes[0], PANELS, strict=True):
        draw(axis, trials.where(seed=seed, **panel)[0])
        start = f"$m={trials[0].params['width']}$: n" if axis is axes[0, 0] else "l"
        axis.set_title(start + title[1:])
        axis.set_ylabel("second coordinate" if axis is axes[0, 0] else "")
    explain(canvas)
    return canvas


def claims(trials: Trials) -> list[Claim]:
    """Check the claims of the cover figure, except the test loss: so many points leave little room to generalise."""
    feature, plain, lazy = (trials.where(**panel) for _, panel in PANELS)
    moves = [median(part, "displacement") for part in (plain, lazy)]
    return [
        # A third of the mass of 200 neurons comes from the initialisation, in random directions: 200 · τ²/2 = 1 of 3.
        *compare(feature, lazy, "Fig. 6", share=0.5),
        Claim(
            "τ=2: without symmetrisation, neurons move at least twice as far",
            "C.1: they need to move slightly more to compensate for the non-zero initialisation",
            f"{moves[0]:.2g} against {moves[1]:.2g}: {moves[0] / moves[1]:.1f} times",
            moves[0] >= 2 * moves[1],
        ),
    ]


EXPERIMENT = Experiment(
    name="many-neurons",
    source="Chizat, Oyallon, Bach 2019, supplement, Figure 6",
    title="Many neurons: feature learning, and two lazy initialisations",
    caption=(
        "The cover figure with many neurons instead of twenty, each of which moves little, so the left panel is"
        " enlarged and the teacher's arrows show directions only: whether a wide network is lazy depends on its scale."
        " If its initial output is not zero (middle), its neurons have to move further than otherwise (right), to"
        " compensate for it."
    ),
    cost={"quick": "8 s on two cores", "paper": "4 min on two cores"},
    grid=grid,
    trial=trial,
    figure=figure,
    claims=claims,
    chunk=15,  # all points: for such small nets, function calls cost more than arithmetic
)
