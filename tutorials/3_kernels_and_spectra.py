# %% [markdown]
# # Kernels and spectra
#
# Lazy training with the square loss is kernel regression with the tangent kernel K = Dh(w₀)Dh(w₀)ᵀ. lazyscope computes
# this kernel layer by layer, without approximation and without forming a Jacobian.

# %%
import torch

import lazyscope as ls
from lazyscope.data.digits import digits
from lazyscope.lab.style import panels

torch.manual_seed(0)
images, labels = digits(n=200, seed=0)
x = images.flatten(1)
net = torch.nn.Sequential(
    torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)
)

kernel = ls.tangent_kernel(net, x)
print(kernel.shape)  # samples × samples × outputs × outputs
parts = ls.tangent_kernel(net, x, by_layer=True)
torch.testing.assert_close(sum(parts.values()), kernel, rtol=1e-4, atol=1e-3)
print(
    {
        name: f"{float(part.diagonal().sum() / kernel.diagonal().sum()):.0%}"
        for name, part in parts.items()
    }
)

# %% [markdown]
# The spectrum of the kernel determines what the tangent model learns, and how fast. The component of the targets along
# eigenvector i is learned at the rate λᵢ/n; the alignment is the share of the targets along the leading eigenvectors.

# %%
spectrum = ls.spectrum(net, x)
targets = torch.nn.functional.one_hot(labels, 10).float() - 0.1
print(
    f"condition {spectrum.condition:.2g},"
    f" effective rank {spectrum.effective_rank:.1f} of {spectrum.size}"
)
aligned = spectrum.alignment(targets)
figure, axes = panels(1, 2, width=3.6, height=3.0)
axes[0, 0].loglog(range(1, spectrum.size + 1), spectrum.eigenvalues)
axes[0, 0].set(xlabel="rank", ylabel="eigenvalue")
axes[0, 1].semilogx(range(1, spectrum.size + 1), aligned.cumulative)
axes[0, 1].set(xlabel="rank", ylabel="share of the targets", ylim=(0, 1))

# %% [markdown]
# For the square loss, the training curve of the tangent model is known in closed form and can be evaluated at any time.

# %%
times = torch.logspace(-2, 4, 7)
flow = ls.tangent_flow(net, ls.loss.Square(), x, targets, times=times)
print([f"{float(value):.3g}" for value in flow.loss])

# %% [markdown]
# If a kernel does not fit into memory, use products with vectors (`TangentOperator`) or write it to disk in tiles
# (`tangent_kernel_to_zarr`, which resumes after an interruption). `limit_kernel_dense` computes the kernel at infinite
# width, and `limit_kernel` that of a module.

# %%
operator = ls.TangentOperator(net, x)
top = ls.spectrum(net, x, top=5).eigenvalues
torch.testing.assert_close(top, spectrum.eigenvalues[:5], rtol=1e-3, atol=1e-3)
circle = torch.nn.functional.normalize(x[:3], dim=1)
print(
    operator.shape,
    ls.limit_kernel_dense(circle, depth=2, activation="relu", kind="ntk"),
)
