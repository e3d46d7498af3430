"""Arguments of the parametric limit kernels and of kernels on disk that are refused, and in which words."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

WRONG = {
    "another kind": ("dense(x, kind='NNGP')", "InputError", 'kind=\'NNGP\' is not known; pass "ntk" or "nngp"'),
    "another kind of images": ("convolution(images, kind='cntk')", "InputError", "kind='cntk' is not known"),
    "two kinds": ("dense(x, kind=['ntk'])", "InputError", "kind=['ntk'] is not known"),
    "another kind of a module": ("module(mlp, x, kind='NTK')", "InputError", "kind='NTK' is not known"),
    "another parametrisation": ("module(mlp, x, parametrisation='mup')", "InputError", 'pass "ntk" or "standard"'),
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
