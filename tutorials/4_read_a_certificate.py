# %% [markdown]
# # Read a certificate
#
# The theorems of lazy training have hypotheses, constants and bounds. A `Certificate` checks the first, names the
# second, evaluates the third, and puts the measured distance between both flows beside it.

# %%
import torch

import lazyscope as ls
from lazyscope.lab.style import panels
from lazyscope.model.two_layer import TwoLayer

torch.manual_seed(0)
net = TwoLayer.gaussian(50, 3, seeds=[0], activation=torch.tanh)[0]
x = torch.randn(4, 3, dtype=torch.float64)
y = torch.randn(4, dtype=torch.float64)

certificates = ls.certify(net, ls.loss.Square(), x, y, alpha=300.0, K=1.0, centred=True)
for certificate in certificates:
    print(certificate, end="\n\n")

# %% [markdown]
# Read it from the top. ✓ and ✗ are the hypotheses with their numbers; a theorem whose hypothesis fails says nothing,
# and its verdict is "does not apply", never "holds". Constants are exact unless marked "upper bound", with which the
# bound is a proof, or "estimate", with which it is not. For two-layer nets with a smooth activation no constant of the
# theorems is an estimate.
#
# Theorem 2.2 says that the distance falls like 1/α. Here is the bound, and what was measured, against α.

# %%
scales = (30.0, 100.0, 300.0, 1000.0)
bounds, distances = [], []
for alpha in scales:
    first = ls.certify(net, ls.loss.Square(), x, y, alpha=alpha, K=1.0, centred=True)[0]
    bounds.append(first.bound)
    distances.append(first.measured)
    print(f"α = {alpha:g}: {first.verdict}, bound {first.bound:.3g}, measured {first.measured:.3g}")

figure, axes = panels(1, 1, width=4.5, height=3.2)
axes[0, 0].loglog(scales, bounds, "s--", label="bound")
axes[0, 0].loglog(scales, distances, "o-", label="measured")
axes[0, 0].set(xlabel="α", ylabel="distance")
axes[0, 0].legend()
