"""The arguments of `lazyscope inspect`: a factory or the name of a model, and data by name or as a file."""

from __future__ import annotations

import importlib
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lazyscope._typing import Inputs
from lazyscope.data.cifar10 import cifar10
from lazyscope.data.digits import digits
from lazyscope.errors import DataError, InputError, LazyscopeError, ModelError
from lazyscope.inspect.library import LIBRARIES, from_library
from lazyscope.loss import CrossEntropy, Loss, Square
from lazyscope.model.base import Model
from lazyscope.model.inputs import Samples

IMAGES = 2000
"""The number of images loaded from CIFAR-10, from which the inspection draws its points."""

LARGEST = 2**31
"""The largest size of the unpacked arrays of a file, in bytes: the default memory of an inspection."""

DATA: dict[str, Callable[[int], tuple[Tensor, Tensor]]] = {
    "digits": lambda seed: digits(seed=seed),
    "cifar10": lambda seed: cifar10("train", n=IMAGES, seed=seed),
}

LOSSES: dict[str, Loss | None] = {"auto": None, "square": Square(), "cross-entropy": CrossEntropy()}


class Brought(NamedTuple):
    """A model with its data, and the loss if the factory returns one."""

    net: nn.Module | Model
    """The model."""
    x: Inputs
    """The inputs."""
    y: Tensor
    """The targets."""
    loss: Any
    """The loss, or None."""
    notes: list[str]
    """Notes for the report."""


def bring(address: str, data: str | None, device: torch.device, *, evaluation: bool, seed: int) -> Brought:
    """Seed PyTorch, call the factory, and load the data.

    Args:
        address: The factory, as `package.module:factory`. It returns a module, `(module, x, y)` or
            `(module, x, y, loss)`. Or the name of a model of timm or torchvision, such as `timm:resnet18`.
        data: "digits", "cifar10", or the path of an `.npz` file with arrays x and y. They replace the data that the
            factory returns. None uses the data of the factory.
        device: The device of the model.
        evaluation: Whether to call `net.eval()`, so that batch-norm uses its running statistics and dropout is off.
        seed: The seed of the factory and of the choice of data.

    Returns:
        The model, the data and the loss.

    Raises:
        ModelError: If the factory cannot be loaded, fails, or returns something else.
        InputError: If there are no data.
        DataError: If the data cannot be read.
    """
    torch.manual_seed(seed)
    net: nn.Module | Model
    x: Inputs | None
    y: Tensor | None
    if address.partition(":")[0] in LIBRARIES and ":" in address:
        if data is None:
            raise InputError(f"'{address}' is a model without data; pass --data cifar10, digits or FILE.npz.")
        net, x, y, notes = from_library(address, *_data(data, seed))
        loss = None
    else:
        net, x, y, loss = _parts(address, _made(address))
        notes = []
        if data is not None:
            x, y = _data(data, seed)
    if x is None or y is None:
        raise InputError(
            f"'{address}' returns a module without data; pass --data digits, cifar10 or FILE.npz, or let it return"
            " (module, x, y)."
        )
    if isinstance(net, nn.Module):
        net = net.eval() if evaluation else net
        net = net.to(device)
        dtype = next((p.dtype for p in net.parameters() if p.is_floating_point()), torch.float32)
    else:
        net = net.to(device)
        dtype = next(iter(net.params.values())).dtype
    if data is not None:  # the precision of the model takes precedence over that of the file
        x = Samples(x).cast(dtype)
        y = y.to(dtype) if y.is_floating_point() else y
    return Brought(net, x, y, loss, notes)


def _made(address: str) -> Any:
    module, colon, name = address.partition(":")
    if not colon or not module or not name:
        raise ModelError(
            f"'{address}' is not the address of a factory; write package.module:factory, or timm:NAME or"
            " torchvision:NAME."
        )
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        found = getattr(importlib.import_module(module), name)
    except LazyscopeError:
        raise
    except Exception as error:  # the user's own module may raise anything
        raise ModelError(
            f"'{address}' cannot be loaded ({_one_line(error)}); write package.module:factory, relative to this folder."
        ) from error
    if isinstance(found, nn.Module | Model):
        return found
    if not callable(found):
        raise ModelError(
            f"'{address}' is a {type(found).__name__}, not a factory; pass a function that returns a module."
        )
    try:
        return found()
    except LazyscopeError:
        raise
    except Exception as error:
        raise ModelError(
            f"The factory '{address}' failed ({_one_line(error)}); call it in Python to see the traceback."
        ) from error


def _parts(address: str, made: Any) -> tuple[nn.Module | Model, Inputs | None, Tensor | None, Any]:
    if isinstance(made, nn.Module | Model):
        return made, None, None, None
    if isinstance(made, tuple) and len(made) in (3, 4) and isinstance(made[0], nn.Module | Model):
        net, x, y, *rest = made
        return net, x, y, rest[0] if rest else None
    raise ModelError(
        f"'{address}' returns {type(made).__name__}; let it return a module, (module, x, y) or (module, x, y, loss)."
    )


def _data(name: str, seed: int) -> tuple[Tensor, Tensor]:
    if name in DATA:
        return DATA[name](seed)
    if not name.endswith(".npz"):
        raise DataError(f"There is no data set '{name}'; pass {', '.join(DATA)}, or a FILE.npz with arrays x and y.")
    path = Path(name)
    if not path.is_file():
        raise DataError(f"There is no file {path}; write one with numpy.savez(path, x=…, y=…).")
    try:
        arrays = _arrays(path)
    except DataError:
        raise
    except Exception as error:  # a damaged file may raise anything
        raise DataError(
            f"{path} cannot be read as plain arrays ({_one_line(error)}); write it with numpy.savez(path, x=…, y=…)."
        ) from error
    for key, array in arrays.items():
        if array.ndim == 0 or array.is_complex():
            kind = "a single number" if array.ndim == 0 else "complex"
            raise DataError(f"{key} in {path} is {kind}; write one row of real numbers per example.")
    return arrays["x"], arrays["y"]


def _arrays(path: Path) -> dict[str, Tensor]:
    """Read x and y from an untrusted file, without unpickling, and without unpacking more than `LARGEST` bytes."""
    with zipfile.ZipFile(path) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an invalid header raises an error with its own message
        names = [name.removesuffix(".npy") for name in file.namelist()]
        if not {"x", "y"} <= set(names):
            found = ", ".join(names) or "nothing"
            raise DataError(f"{path} contains {found}; write it with numpy.savez(path, x=…, y=…).")
        members = [file.getinfo(f"{key}.npy") for key in ("x", "y")]
        if (size := sum(member.file_size for member in members)) > LARGEST:
            raise DataError(
                f"{path} unpacks to {size / 2**30:.1f} GiB, but at most {LARGEST / 2**30:.0f} GiB are read; write fewer"
                " rows, or let the factory return (module, x, y)."
            )
        return {key: torch.from_numpy(_array(file, member)) for key, member in zip("xy", members, strict=True)}


def _array(file: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    with file.open(member) as opened:
        array: np.ndarray = np.lib.format.read_array(opened, allow_pickle=False)  # unpickling could run arbitrary code
        if opened.read(1):  # reading to the end also verifies the checksum
            raise ValueError("there are data after the array")
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        return array.astype(np.int64)  # PyTorch supports few operations on larger unsigned integers
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
