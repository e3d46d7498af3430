# %% [markdown]
# # Reproduce a figure, and add your own experiment
#
# On the command line:
#
#     lazyscope list
#     lazyscope reproduce cover --scale quick
#     lazyscope reproduce scale --scale paper --device cuda
#
# Trials are stored as soon as their batch ends. Stored trials are not measured again, and an interruption loses at most
# the batch in progress. The table at the end compares each claim of the source with the measurement. All of this is
# also available from Python.

# %%
import tempfile
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

import lazyscope as ls
from lazyscope.lab import Claim, Experiment, Trials
from lazyscope.lab.experiment import Params, Result
from lazyscope.lab.run import records, run
from lazyscope.lab.store import Store
from lazyscope.lab.style import panels

# %% [markdown]
# Your own experiment consists of four functions. The grid lists the points, a trial measures several of them at once,
# and the figure and the claims are computed from the stored results. The experiment below measures how far the weights
# of a network move, as a function of its width.


# %%
def grid(scale: str) -> list[Params]:
    """List the widths and seeds."""
    widths = [16, 64, 256, 1024] if scale == "quick" else [2**k for k in range(4, 14)]
    return [{"width": width, "seed": seed} for width in widths for seed in range(3)]


def trial(points: list[Params], device: torch.device) -> list[Result]:
    """Measure ‖w - w₀‖/‖w₀‖ after training.

    The kernel grows like the width, so the step size is 1/width.
    """
    found: list[Result] = []
    for point in points:
        torch.manual_seed(int(point["seed"]))
        x, y = torch.randn(20, 5), torch.randn(20, 1)
        width = int(point["width"])
        net = torch.nn.Sequential(
            torch.nn.Linear(5, width), torch.nn.Tanh(), torch.nn.Linear(width, 1)
        )
        size = float(torch.cat([p.detach().flatten() for p in net.parameters()]).norm())
        path = ls.gradient_descent(net, ls.loss.Square(), x, y, lr=1 / width, steps=500)
        found.append({"moved": float(path.displacement[-1]) / size})
    return found


def median(trials: Trials, width: int) -> float:
    """Compute the median over the seeds."""
    return float(np.median(trials.where(width=width).column("moved")))


def figure(trials: Trials) -> Figure:
    """Draw one dot per network."""
    canvas, axes = panels(1, 1, width=4.5, height=3.2)
    axes[0, 0].loglog(trials.column("width"), trials.column("moved"), "o")
    axes[0, 0].set(xlabel="width", ylabel="‖w - w₀‖ / ‖w₀‖")
    return canvas


def claims(trials: Trials) -> list[Claim]:
    """List one claim, which could also fail."""
    narrow, wide = median(trials, 16), median(trials, 1024)
    return [
        Claim(
            "wide nets move less",
            "folklore",
            f"{wide:.2g} against {narrow:.2g}",
            wide < narrow / 2,
        )
    ]


EXPERIMENT = Experiment(
    name="moves-and-width",
    source="this tutorial",
    title="Relative movement of the weights against the width",
    cost={"quick": "2 s", "paper": "1 min"},
    grid=grid,
    trial=trial,
    figure=figure,
    claims=claims,
    chunk=3,
)

# %% [markdown]
# If the experiment is in your own module, `lazyscope reproduce package.module:EXPERIMENT` runs it like any other. You
# can also run it from Python:

# %%
with tempfile.TemporaryDirectory() as folder:
    store = Store(Path(folder))
    outcome = run(EXPERIMENT, "quick", store, device=torch.device("cpu"))
    stored = Trials(
        record.trial
        for record in records(EXPERIMENT, "quick", store)
        if record is not None
    )
for claim in outcome.claims:
    print(claim.text, "·", claim.measured, "·", "holds" if claim.holds else "fails")
picture = figure(stored)
