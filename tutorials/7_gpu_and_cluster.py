# %% [markdown]
# # On a GPU and a cluster
#
# Everything follows its tensors: a module and data on `cuda` are studied there.

# %%
import tempfile
from pathlib import Path

import torch

import lazyscope as ls

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2)).to(device)
x = torch.randn(120, 20, device=device)
print(ls.tangent_kernel(net, x).device)

# %% [markdown]
# On NVIDIA's GPUs torch multiplies convolutions in TF32 by default, with 10 bits of mantissa. Training does not mind.
# Where you compare numbers at large α, switch it off: `torch.backends.cudnn.allow_tf32 = False`.
#
# Figures run there with `lazyscope reproduce NAME --scale paper --device cuda`. Trials run in several processes with
# `--workers 4`, and on a Dask cluster with `--dask tcp://scheduler:8786`, see the page on clusters.
#
# A kernel larger than memory is written to disk in tiles; a kill loses the tile in flight, and the same call goes on.

# %%
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "K.zarr"
    ls.tangent_kernel_to_zarr(net, x, path, tile=40)
    stored = ls.open_tangent_kernel(path)
    print(stored.shape)
    part = torch.from_numpy(stored[:5, 100:105])
torch.testing.assert_close(part, ls.tangent_kernel(net, x[:5], x[100:105]).cpu(), rtol=1e-4, atol=1e-4)
