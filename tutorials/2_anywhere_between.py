# %% [markdown]
# # Your model, between feature learning and lazy training
#
# lazyscope accepts any `nn.Module` and any function `f(params, x)`. The module is not modified: its parameters are read
# as w₀.

# %%
import math

import torch

import lazyscope as ls
from lazyscope.data.digits import digits
from lazyscope.lab.style import panels

torch.manual_seed(0)
images, labels = digits(seed=0)
x, y, x_test, y_test = images[:300], labels[:300], images[300:], labels[300:]
net = torch.nn.Sequential(
    torch.nn.Conv2d(1, 8, 3),
    torch.nn.ReLU(),
    torch.nn.MaxPool2d(2),
    torch.nn.Flatten(),
    torch.nn.Linear(72, 10),
)

# %% [markdown]
# We train the convolutional network on handwritten digits at several scales. The smoothness of `CrossEntropy` is known,
# and the tangent model is stable for step sizes below 2/(smoothness · λ_max). We use half of that for every α.

# %%
loss = ls.loss.CrossEntropy()
top = float(ls.spectrum(net, x, top=1).eigenvalues[0]) / len(x)
lr = 1.0 / (loss.smoothness * top)
accuracies, moves = {}, {}
scales = (0.3, 1.0, 10.0, 1e3, 1e6, math.inf)
for alpha in scales:
    model = ls.Scaled(net, alpha=alpha)
    optimiser = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(200):
        optimiser.zero_grad()
        loss(model(x), y).backward()
        optimiser.step()
    with torch.no_grad():
        accuracies[alpha] = float((model(x_test).argmax(1) == y_test).float().mean())
    moves[alpha] = model.displacement() / alpha
    print(
        f"α = {alpha:g}: test accuracy {accuracies[alpha]:.1%},"
        f" weights moved by {moves[alpha]:.2g}"
    )

# %%
figure, axes = panels(1, 1, width=5.0, height=3.2)
shown = [min(alpha, 1e7) for alpha in scales]
axes[0, 0].semilogx(shown, [100 * accuracies[alpha] for alpha in scales], "o-")
axes[0, 0].set(xlabel="α (the last point is ∞)", ylabel="test accuracy (%)")

# %% [markdown]
# `weights()` returns the current weights w₀ + v/α under the names that they have in the module, so that you can load
# them with `load_state_dict`.

# %%
final = ls.Scaled(net, alpha=1.0)
with torch.no_grad():
    for parameter in final.parameters():
        parameter.add_(0.01)
twin = torch.nn.Sequential(
    torch.nn.Conv2d(1, 8, 3),
    torch.nn.ReLU(),
    torch.nn.MaxPool2d(2),
    torch.nn.Flatten(),
    torch.nn.Linear(72, 10),
)
twin.load_state_dict(final.weights(), strict=False)
with torch.no_grad():
    torch.testing.assert_close(final(x), twin(x) - net(x), rtol=1e-3, atol=1e-4)

# %% [markdown]
# There are two further transformations. `Symmetrised(net)` is h(w_a) - h(w_b), with w_a = w_b at initialisation, so
# that its initial output is zero. `Linearised(net)` is h(w₀) + Dh(w₀)v, the limit of lazy training.

# %%
with torch.no_grad():
    print(
        float(ls.Symmetrised(net)(x).abs().max()),
        torch.equal(ls.Linearised(net)(x), net(x)),
    )
