# %% [markdown]
# # Read a certificate
#
# The theorems on lazy training have hypotheses, constants and bounds. A `Certificate` checks the hypotheses, lists the
# constants, evaluates the bound, and compares it with the measured distance between the two flows.

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
# Read a certificate from the top. The marks ✓ and ✗ show which hypotheses hold, with their numbers. If a hypothesis
# fails, the theorem makes no statement, and the verdict is "does not apply" rather than "holds". Constants are exact
# unless they are marked "upper bound", in which case the bound is still proved, or "estimate", in which case it is not.
# For two-layer networks with a smooth activation, no constant of the theorems is an estimate.
#
# By Theorem 2.2, the distance falls like 1/α. The following code compares the bound with the measured distance for
# several α.

# %%
scales = (30.0, 100.0, 300.0, 1000.0)
bounds, distances = [], []
for alpha in scales:
    first = ls.certify(net, ls.loss.Square(), x, y, alpha=alpha, K=1.0, centred=True)[0]
    bounds.append(first.bound)
    distances.append(first.measured)
    print(
        f"α = {alpha:g}: {first.verdict},"
        f" bound {first.bound:.3g}, measured {first.measured:.3g}"
    )

figure, axes = panels(1, 1, width=4.5, height=3.2)
axes[0, 0].loglog(scales, bounds, "s--", label="bound")
axes[0, 0].loglog(scales, distances, "o-", label="measured")
axes[0, 0].set(xlabel="α", ylabel="distance")
axes[0, 0].legend()
