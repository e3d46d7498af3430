# %% [markdown]
# # Measures and deconvolution
#
# A wide two-layer network defines a measure on the space of neurons. Sparse inverse problems have the same form with
# other features: minimise R(∫φ dν) + λ|ν|(Θ) over measures ν. In this example, three spikes on the torus are observed
# through a low-pass filter, and the task is to find their positions.

# %%
import math

import torch

import lazyscope as ls
from lazyscope.flow.conic import conic_descent, safe_step
from lazyscope.lab.style import panels
from lazyscope.model.particles import Box, Measure, Torus, dual_certificate
from lazyscope.problem.deconvolution import Deconvolution

problem = Deconvolution.plane(penalty=1.0)
print(problem.truth.theta, problem.truth.weights)

# %% [markdown]
# Conic particle gradient descent moves weighted particles: it updates their masses multiplicatively and their positions
# along gradients. If there are enough particles and they are spread well, it finds the global minimum, although the
# problem is not convex in the positions.

# %%
start = Measure.grid(Torus(2), 8)
functional = problem.functional
rate = safe_step(functional, start)
path = conic_descent(functional, start, alpha=rate, beta=rate, steps=1000)
final = path.final
print(f"J falls from {float(path.value[0]):.3f} to {float(path.value[-1]):.6f}")

# %% [markdown]
# The dual certificate bounds the difference to the minimum over all measures. The bound is proved over the whole torus.

# %%
print(dual_certificate(functional, final))

# %% [markdown]
# `solve_sparse` performs all of these steps, merges particles into spikes and refines them, until the certificate meets
# the tolerance.

# %%
found = ls.solve_sparse(functional.features, functional.fidelity, 1.0, Torus(2))
print(found)
figure, axes = panels(1, 1, width=4.0, height=4.0)
axis = axes[0, 0]
axis.scatter(*final.theta.T, s=200 * final.weights, alpha=0.4, label="particles")
axis.scatter(*problem.truth.theta.T, marker="x", c="black", label="truth")
axis.scatter(
    *found.measure.theta.T, facecolors="none", edgecolors="red", s=120, label="solution"
)
axis.set(xlim=(0, 2 * math.pi), ylim=(0, 2 * math.pi), aspect="equal")
axis.legend(loc="lower left")

# %% [markdown]
# You can define your own features: any torch function of a position on a torus, a sphere or a box. If you provide a
# bound on its second derivative, `FeatureMap(phi, curvature)`, the gap is proved; otherwise, it is labelled as an
# estimate.

# %%
grid = torch.linspace(0, 1, 20, dtype=torch.float64)


def bump(theta: torch.Tensor) -> torch.Tensor:
    """Compute the signal of 20 sensors on a line for a source at θ."""
    return torch.exp(-((theta - grid) ** 2) / 0.02)


seen = 2.0 * bump(torch.tensor([0.3])) + 1.0 * bump(torch.tensor([0.7]))
sources = ls.solve_sparse(bump, seen, 0.01, Box([0.0], [1.0]))
print(sources)
print(sources.measure.theta.flatten().tolist(), sources.measure.weights.tolist())
