"""Public functions can run in several threads at once, without errors and with the results of one thread."""

from __future__ import annotations

import functools
import itertools
import os
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.entrances import ENTRANCES, Data, Numbers, encoder, mlp
from tests.test_global_state import state
from torch import nn

import lazyscope as ls
from lazyscope.ambient import exact_convolutions, full_precision
from lazyscope.model.jacobian import SecondDerivative

SLOW = os.environ.get("LAZYSCOPE_SLOW") == "1"
ROUNDS = 200 if SLOW else 1
MAKERS = (mlp, encoder)
QUICK = {"scaled", "linearised", "kernel", "kernel_by_layer", "operator", "monitor", "tangent_flow"}
"""The entry points that every run tries on the encoder."""


@pytest.fixture
def often() -> Iterator[None]:
    """Switch threads five times as often as by default."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-3)
    yield
    sys.setswitchinterval(before)


def names_of(which: int) -> list[str]:
    """Return the computations that are tested on the network with this index."""
    return [name for name in ENTRANCES if SLOW or which == 0 or name in QUICK]


def agrees(found: Numbers, expected: Numbers) -> bool:
    """Compare results up to rounding, which depends on the alignment of memory."""
    return found.keys() == expected.keys() and all(
        torch.allclose(found[key], value, rtol=1e-9, atol=1e-12) for key, value in expected.items()
    )


@pytest.mark.timeout(7200)
def test_two_threads_compute_what_one_does(often: None) -> None:
    expected = [{name: ENTRANCES[name](make()) for name in names_of(i)} for i, make in enumerate(MAKERS)]
    before = {**state(), "random": None}  # networks draw their weights from the global generator
    problems: list[str] = []

    def work(thread: int, start: threading.Barrier) -> None:
        order = random.Random(thread)
        for number in range(ROUNDS):
            which = int((thread + number) % 50 == 1)
            names = names_of(which)
            order.shuffle(names)
            start.wait(600)
            data: Data = MAKERS[which]()
            for name in names:
                try:
                    if not agrees(ENTRANCES[name](data), expected[which][name]):
                        problems.append(f"round {number}, {name}: other numbers")
                except Exception as error:
                    problems.append(f"round {number}, {name}: {type(error).__name__}: {str(error)[:200]}")

    barrier = threading.Barrier(2)
    threads = [threading.Thread(target=work, args=(number, barrier)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert {**state(), "random": None} == before


def test_one_model_is_studied_by_two_threads_at_once(often: None) -> None:
    """A model caches its graphs, and evaluating a module temporarily replaces its weights."""
    for make in MAKERS:
        data = make()
        expected = ls.tangent_kernel(data.net, data.x)
        for _ in range(ROUNDS):
            found = together(functools.partial(ls.tangent_kernel, ls.Model(data.net), data.x))
            assert all(torch.allclose(kernel, expected, rtol=1e-9) for kernel in found)


def together(compute: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    """Run a computation in two threads that start at the same time, and return both results."""
    start = threading.Barrier(2)

    def wait_and_compute(_: int) -> torch.Tensor:
        start.wait(60)
        return compute()

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(wait_and_compute, range(2)))


def test_second_derivatives_in_two_threads(often: None) -> None:
    """Torch counts the levels of forward-mode derivatives for the whole process."""
    data = mlp()
    form = SecondDerivative(data.net, data.x)
    u = torch.ones(1, form.shape[1], dtype=torch.float64)
    expected = form.pair(u, u)

    def repeated() -> torch.Tensor:
        return torch.cat([form.pair(u, u) for _ in range(100)])

    assert all(torch.allclose(found, expected.expand_as(found), rtol=1e-12) for found in together(repeated))


def test_precision_is_restored_by_the_last_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order in which two computations start and end does not matter."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    for first, second in itertools.permutations([exact_convolutions, full_precision]):
        first.__enter__()
        second.__enter__()
        first.__exit__()
        assert not torch.backends.cudnn.allow_tf32
        second.__exit__()
        assert torch.backends.cudnn.allow_tf32


class Kinked(nn.Module):
    """A network that causes a warning in every inspection and every computation of κ."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp().net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(x).relu() + 0.1 * self.net(x)
        return out


def test_notices_stay_in_their_thread(often: None) -> None:
    """An inspection collects warnings as notes of its report, while other threads still emit warnings."""
    data, net = mlp(), Kinked()
    filters = list(warnings.filters)
    reports: list[ls.Report] = []
    inspecting = threading.Thread(
        target=lambda: reports.append(ls.inspect(net, data.x, data.y, alphas=[], steps=2, seconds=600))
    )
    inspecting.start()
    while inspecting.is_alive():
        with pytest.raises(ls.KinkWarning):
            ls.relative_scale(net, data.x, data.y, starts=1)
    inspecting.join()
    assert sum("kinks" in note for note in reports[0].notes) == 1
    assert warnings.filters == filters
    with pytest.raises(ls.KinkWarning):
        ls.relative_scale(net, data.x, data.y, starts=1)
