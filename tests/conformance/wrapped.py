"""Modules inside of wrappers."""

from __future__ import annotations

import warnings

import torch
from tests.conformance.ordinary import mlp, points
from tests.conformance.subject import Subject


def compiled() -> Subject:
    """A compiled module, `torch.compile(net)`."""
    net = mlp()
    return Subject(torch.compile(net), points(), plain=net)


def scripted() -> Subject:
    """A scripted module, `torch.jit.script(net)`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return Subject(torch.jit.script(mlp()), points())
