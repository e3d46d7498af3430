# %% [markdown]
# # First steps
#
# A network can fit the same data in two ways. At scale α = 1, its hidden features change during training; as α grows,
# it behaves more and more like its own linearisation. In lazyscope, α is a parameter of the model.

# %%
import math

import torch

import lazyscope as ls
from lazyscope.lab.style import panels

torch.manual_seed(0)
x = torch.randn(100, 10)
y = torch.relu(x[:, :1]) - torch.relu(x[:, 1:2])  # a teacher with two neurons
net = torch.nn.Sequential(
    torch.nn.Linear(10, 128), torch.nn.ReLU(), torch.nn.Linear(128, 1)
)

# %% [markdown]
# `Scaled` is an ordinary module. Its parameters `v` are initialised to zero, and its output is α(h(w₀ + v/α) - h(w₀)).
# Any torch optimiser can train it, with the same step size for every α, including ∞.

# %%
curves = {}
for alpha in (0.3, 1.0, 10.0, math.inf):
    model = ls.Scaled(net, alpha=alpha)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    curves[alpha] = []
    for _ in range(300):
        optimiser.zero_grad()
        loss = ls.loss.Square()(model(x), y)
        loss.backward()
        optimiser.step()
        curves[alpha].append(loss.item())
    moved = model.displacement() / alpha
    end = curves[alpha][-1]
    print(f"α = {alpha:>4}: loss {end:.5f}, weights moved by {moved:.2g}")

# %% [markdown]
# The loss decreases at every scale, while the distance that the weights move falls like 1/α. For large α, the curves
# agree with that of the tangent model.

# %%
figure, axes = panels(1, 1, width=5.0, height=3.2)
for alpha, curve in curves.items():
    axes[0, 0].semilogy(curve, label=f"α = {alpha:g}")
axes[0, 0].set(xlabel="step", ylabel="training loss")
axes[0, 0].legend()

# %% [markdown]
# Is this network lazy at α = 1? The inverse relative scale κ of the paper answers this question without training: the
# network is lazy if κ is far below 1. With ReLU, κ is computed on the smooth piece around w₀, and a `KinkWarning` is
# issued; here we use the same network with tanh instead.

# %%
smooth = torch.nn.Sequential(
    torch.nn.Linear(10, 128), torch.nn.Tanh(), torch.nn.Linear(128, 1)
).double()
scale = ls.relative_scale(smooth, x.double(), y.double())
print(scale)
print(f"α at which κ would be 0.01: {scale.lazy_scale(0.01):.3g}")
