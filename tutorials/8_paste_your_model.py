# %% [markdown]
# # Paste your model, get the report
#
# Replace the next cell by your own network, inputs and targets. Any `torch.nn.Module` will do; the first dimension of
# `x` and `y` counts the samples. Targets are numbers, or class indices for the cross-entropy.

# %%
import torch

import lazyscope as ls

torch.manual_seed(0)
net = torch.nn.Sequential(
    torch.nn.Linear(8, 48), torch.nn.ReLU(), torch.nn.Linear(48, 1)
)
x = torch.randn(40, 8)
y = torch.relu(x[:, :1]) - torch.relu(x[:, 1:2])

# %% [markdown]
# `inspect` trains the network, its linearisation, and scaled copies of the network, within a budget of time. Your
# network is not changed.

# %%
report = ls.inspect(net, x, y, steps=60, seconds=10)
print(report)

# %% [markdown]
# The first line is the verdict, and the second what it means. Then come κ, the number that predicts it before any
# training, how much of the training the linearisation explains, and a safe learning rate. The last lines are code that
# makes the training lazier or richer. Feature learning is the usual and often the wanted regime; lazy training is
# easier to analyse and often generalises worse.
#
# The full report is one web page, with figures and explanations. In Colab, it is in the list of files on the left.

# %%
path = report.save("report.html")
print(path)

# %% [markdown]
# To move the same network in either direction, train a scaled model. It is a module like any other.

# %%
lazier = ls.Scaled(net, alpha=10.0)
more_features = ls.Scaled(net, alpha=0.3)
print(lazier(x).shape, more_features(x).shape)
