# %% [markdown]
# # On a GPU and a cluster
#
# Computations run on the device of their inputs: if the module and the data are on `cuda`, so are all results.

# %%
import tempfile
from pathlib import Path

import torch

import lazyscope as ls

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
net = torch.nn.Sequential(
    torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2)
).to(device)
x = torch.randn(120, 20, device=device)
print(ls.tangent_kernel(net, x).device)

# %% [markdown]
# On NVIDIA GPUs, torch computes convolutions in TF32 by default, with a mantissa of 10 bits. This is accurate enough
# for training. To compare numbers at large α, switch it off: `torch.backends.cudnn.allow_tf32 = False`.
#
# To run figures on the GPU, use `lazyscope reproduce NAME --scale paper --device cuda`. `--workers 4` runs trials in
# four processes, and `--dask tcp://scheduler:8786` runs them on a Dask cluster; see the guide on clusters.
#
# A kernel that is larger than memory can be written to disk in tiles. If the process is interrupted, only the tile in
# progress is lost, and the same call continues.

# %%
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "K.zarr"
    ls.tangent_kernel_to_zarr(net, x, path, tile=40)
    stored = ls.open_tangent_kernel(path)
    print(stored.shape)
    part = torch.from_numpy(stored[:5, 100:105])
torch.testing.assert_close(
    part, ls.tangent_kernel(net, x[:5], x[100:105]).cpu(), rtol=1e-4, atol=1e-4
)
