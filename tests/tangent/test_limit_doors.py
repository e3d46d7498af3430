"""Arguments of the parametric limit kernels and of kernels on disk that are refused, and in which words."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from lazyscope.tangent.limit_arguments import checked_depth, per_layer

WRONG = {
    "another kind": ("dense(x, kind='NNGP')", "InputError", 'kind=\'NNGP\' is not known; pass "ntk" or "nngp"'),
    "another kind of images": ("convolution(images, kind='cntk')", "InputError", "kind='cntk' is not known"),
    "two kinds": ("dense(x, kind=['ntk'])", "InputError", "kind=['ntk'] is not known"),
    "another kind of a module": ("module(mlp, x, kind='NTK')", "InputError", "kind='NTK' is not known"),
    "another parametrisation": ("module(mlp, x, parametrisation='mup')", "InputError", 'pass "ntk" or "standard"'),
    "an array of inputs": ("dense(x.numpy())", "InputError", "not of type ndarray; convert them with torch.as_tensor"),
    "a list of inputs": ("dense(x.tolist())", "InputError", "not of type list; convert them"),
    "an array of images": ("convolution(images, images.numpy())", "InputError", "not of type ndarray"),
    "inputs without entries": ("dense(x[:, :0])", "InputError", "(2, 0), without entries; pass at least one"),
    "images without channels": ("convolution(images[:, :0])", "InputError", "without entries"),
    "sparse inputs": ("dense(x.to_sparse())", "InputError", "torch.sparse_coo; convert them with to_dense()"),
    "sparse inputs of a module": ("module(mlp, x.to_sparse())", "InputError", "convert them with to_dense()"),
    "inputs without values": ("dense(x.to('meta'))", "InputError", "device meta, without values; pass tensors"),
    "inputs of a module without values": ("module(mlp, x, x.to('meta'))", "InputError", "device meta, without values"),
    "an array of variances": ("dense(x, weight_variance=numpy.ones(2))", "ModelError", "not array([1., 1.]); convert"),
    "a tensor of variances": (
        "dense(x, bias_variance=torch.ones(2))",
        "ModelError",
        "arrays and tensors with .tolist()",
    ),
    "no variance": (
        "dense(x, weight_variance=None)",
        "ModelError",
        "weight_variance must be a number, or a list of one",
    ),
    "a text as variance": ("dense(x, weight_variance='12')", "ModelError", "not '12'; convert"),
    "texts as rates": ("dense(x, weight_rate=['1', '2'])", "ModelError", "weight_rate must be a number"),
    "a number of layers that is a float": (
        "dense(x, depth=2.0)",
        "ModelError",
        "depth must be a whole number, not 2.0",
    ),
    "half a layer": ("convolution(images, depth=2.5)", "ModelError", "whole number, not 2.5; pass an int"),
    "a list of activations": ("dense(x, activation=['relu'])", "ModelError", "choose relu or abs"),
    "two sides": (
        "convolution(images, kernel_size=(3, 3))",
        "ModelError",
        "kernel_size must be a whole number, not (3, 3)",
    ),
    "a side that is a float": ("convolution(images, kernel_size=3.0)", "ModelError", "whole number, not 3.0"),
    "a text for pooled": ("convolution(images, pooled='no')", "ModelError", "neither True nor False; pass one of them"),
    "a tile that is a float": (
        "stored(mlp, x, folder, tile=2.5)",
        "InputError",
        "tile must be a whole number, not 2.5",
    ),
    "no path": ("stored(mlp, x, None)", "InputError", "path=None is not a path; pass the folder"),
    "a file as folder": (
        "stored(mlp, x, torch.__file__ + '/K')",
        "StoreError",
        "cannot be written to (Not a directory); choose",
    ),
    "a folder of the kernel": ("stored(mlp, x, '/proc/none/K')", "StoreError", "cannot be written to (No such file"),
    "stored arrays": ("stored(mlp, x.numpy(), folder)", "InputError", "convert arrays with torch.as_tensor"),
    "stored values on meta": ("stored(mlp, x.to('meta'), folder)", "InputError", "device meta, without values"),
    "stored other kind": ("stored(mlp, x, folder, kind='NTK')", "InputError", "kind='NTK' is not known"),
    "no progress": ("stored(mlp, x, folder, progress=None)", "InputError", "progress=None is not a function"),
}
"""Calls, the error that they raise, and a part of its message."""

SCRIPT = """
import json, sys, numpy, torch, lazyscope
from torch import nn
torch.manual_seed(0)
mlp = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 1))
x, images, found = torch.randn(2, 3), torch.randn(2, 1, 4, 4), {}
dense, convolution, module = lazyscope.limit_kernel_dense, lazyscope.limit_kernel_convolution, lazyscope.limit_kernel
stored = lazyscope.limit_kernel_to_zarr
folder = sys.argv[1]
for name, call in json.loads(input()).items():
    try:
        found[name] = "no error", str(eval(call))
    except Exception as error:
        found[name] = type(error).__name__, str(error)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """The errors of all calls, in a process that does not check annotations at run time."""
    calls = json.dumps({name: call for name, (call, _, _) in WRONG.items()})
    command = [sys.executable, "-c", SCRIPT, str(tmp_path_factory.mktemp("doors"))]
    run = subprocess.run(command, input=calls, capture_output=True, text=True, check=True)
    found: dict[str, tuple[str, str]] = json.loads(run.stdout)
    return found


@pytest.mark.xdist_group("limit doors")  # one process computes the errors
@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused(name: str, errors: dict[str, tuple[str, str]]) -> None:
    _, error, words = WRONG[name]
    kind, message = errors[name]
    assert (kind, words in message) == (error, True), message


def test_numbers_of_other_types_are_taken() -> None:
    """Whole numbers of NumPy, and numbers that are tensors without axes."""
    two = torch.tensor(2.0)
    assert checked_depth(np.int64(3)) == checked_depth(torch.tensor(3)) == 3
    assert per_layer("weight_variance", two, 3) == [2, 2, 2]
    assert per_layer("weight_variance", [np.float32(1), two, 3], 3) == [1, 2, 3]
