"""Spectra of tangent kernels: dense, matrix-free and by layer, and the quantities derived from them."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from torch import nn
from torch.nn.functional import one_hot

from lazyscope.errors import InputError
from lazyscope.linalg import spectral_density
from lazyscope.memory import Memory
from lazyscope.model.base import Model
from lazyscope.tangent.kernel import tangent_kernel
from lazyscope.tangent.operator import TangentOperator, as_matrix
from lazyscope.tangent.spectrum import Spectrum, layer_spectra, spectrum


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model(nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 3))).double()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(30, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def diagonal(values: torch.Tensor) -> Spectrum:
    return Spectrum.of(torch.diag(values))


def test_dense_is_that_of_the_jacobian(model: Model, x: torch.Tensor) -> None:
    found = spectrum(model, x)
    singular = torch.linalg.svdvals(model.jacobian(x))
    torch.testing.assert_close(found.eigenvalues, singular**2, rtol=1e-9, atol=1e-10)
    assert found.size == 90
    assert found.condition == pytest.approx(float(singular[0] / singular[-1]) ** 2, rel=1e-6)
    assert found.effective_rank == pytest.approx(float((singular**2).sum() / singular[0] ** 2))
    assert found.trace.error == 0


def test_top_is_dense_and_says_how_well(model: Model, x: torch.Tensor) -> None:
    dense, top = spectrum(model, x), spectrum(model, x, top=8, batch=7)
    torch.testing.assert_close(top.eigenvalues, dense.eigenvalues[:8], rtol=1e-9, atol=0)
    assert float((top.residuals / top.eigenvalues).max()) < 1e-8
    assert top.size == 90
    assert abs(top.trace.value - dense.trace.value) < 4 * top.trace.error
    assert top.condition == pytest.approx(float(dense.eigenvalues[0] / dense.eigenvalues[7]))
    y = torch.randn(30, 3)
    torch.testing.assert_close(top.alignment(y).shares[0], dense.alignment(y).shares[0], rtol=1e-6, atol=0)


def test_top_in_float32(model: Model, x: torch.Tensor) -> None:
    dense, top = spectrum(model, x), spectrum(model.to(torch.float32), x.float(), top=8)
    torch.testing.assert_close(top.eigenvalues, dense.eigenvalues[:8], rtol=1e-5, atol=0)


def test_density_of_the_operator(model: Model, x: torch.Tensor) -> None:
    dense = spectrum(model, x)
    density = spectral_density(TangentOperator(model, x), probes=12, steps=20)
    assert density.moment(0)[0] == pytest.approx(90)
    for degree in (1, 2):
        value, error = density.moment(degree)
        assert abs(value - float((dense.eigenvalues**degree).sum())) < 4 * error


def test_layers_have_their_own_spectra(model: Model, x: torch.Tensor) -> None:
    layers = layer_spectra(model, x)
    kernels = tangent_kernel(model, x, by_layer=True)
    assert set(layers) == set(kernels)
    for name, found in layers.items():
        torch.testing.assert_close(
            found.eigenvalues, torch.linalg.eigvalsh(as_matrix(kernels[name])).flip(0), rtol=1e-9, atol=1e-9
        )
    assert sum(found.trace.value for found in layers.values()) == pytest.approx(spectrum(model, x).trace.value)


@pytest.mark.parametrize("exponent", [-0.5, -1.0, -2.0])
def test_a_power_law_is_found(exponent: float) -> None:
    ranks = torch.arange(1, 501, dtype=torch.float64)
    values = 3 * ranks**exponent
    values[0] = 1000.0  # an outlier, as the top 0.2 % is not part of the fit
    found = diagonal(values).decay()
    assert (found.first, found.last) == (2, 250)
    assert found.exponent == pytest.approx(exponent)
    assert math.exp(found.level) == pytest.approx(3)
    assert found.r_squared == pytest.approx(1)
    assert diagonal(values).decay(10, 20).exponent == pytest.approx(exponent)


def test_an_exponential_is_no_power_law() -> None:
    found = diagonal(torch.exp(-0.05 * torch.arange(500, dtype=torch.float64))).decay()
    assert found.r_squared < 0.8


def test_singular_kernels_have_no_condition() -> None:
    assert diagonal(torch.tensor([2.0, 1.0, 0.0])).condition == math.inf
    assert diagonal(torch.tensor([2.0, 1.0, -1e-9])).condition == math.inf
    assert diagonal(torch.ones(5)).effective_rank == pytest.approx(5)


def test_alignment() -> None:
    found = diagonal(torch.tensor([3.0, 2.0, 1.0, 0.5]).double())
    shares = found.alignment(torch.tensor([[2.0, 0.0], [0.0, 1.0]]))
    torch.testing.assert_close(shares.shares, torch.tensor([0.8, 0, 0, 0.2], dtype=torch.float64))
    torch.testing.assert_close(shares.cumulative, torch.tensor([0.8, 0.8, 0.8, 1.0], dtype=torch.float64))


def test_alignment_of_classes_adds_up(model: Model, x: torch.Tensor) -> None:
    classes = torch.randint(0, 3, (30,), generator=torch.Generator().manual_seed(2))
    found = spectrum(model, x)
    assert float(found.alignment(one_hot(classes, 3)).cumulative[-1]) == pytest.approx(1)
    with pytest.raises(InputError, match="one-hot"):
        found.alignment(classes)
    with pytest.raises(InputError, match="nonzero targets"):
        found.alignment(torch.zeros(30, 3))


def test_a_decay_beyond_what_is_known_is_refused(model: Model, x: torch.Tensor) -> None:
    with pytest.raises(InputError, match="8 are known"):
        spectrum(model, x, top=8).decay(2, 20)


@pytest.mark.parametrize("memory", ["1MB", 10**6, 1e6])
def test_memory_as_users_write_it(model: Model, x: torch.Tensor, memory: Memory) -> None:
    expected = spectrum(model, x).eigenvalues
    torch.testing.assert_close(spectrum(model, x, memory=memory).eigenvalues, expected)
    assert set(layer_spectra(model, x, memory=memory)) == set(model.params)
    with pytest.raises(InputError, match='memory="2GB"'):
        spectrum(model, x, memory="some")
    with pytest.raises(InputError, match='memory="2GB"'):
        layer_spectra(model, x, memory=-1)


def test_a_spectrum_that_does_not_fit_is_refused_before_anything_is_computed(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lazyscope.memory.free_memory", lambda device: 10**9)
    monkeypatch.setattr(sys.modules[spectrum.__module__], "tangent_kernel", None)
    x = torch.zeros(3000, 6, dtype=torch.float64)
    with pytest.raises(
        InputError, match=r"\(9000, 9000\).* takes 0.648 GB and computing it 3.89 GB, but only 1 GB"
    ) as caught:
        spectrum(model, x)
    for way in ("top=50", "TangentOperator", 'outputs="trace"', "tangent_kernel_to_zarr"):
        assert way in str(caught.value)
    with pytest.raises(InputError, match=r"computing it 7.78 GB"):  # four kernels and their eigenvectors
        layer_spectra(model, x)
    with pytest.raises(InputError, match="eigenvectors"):
        Spectrum.of(torch.eye(9000))


def test_targets_of_an_alignment_may_be_a_list() -> None:
    found = diagonal(torch.tensor([2.0, 1.0]).double())
    torch.testing.assert_close(found.alignment([3.0, 4.0]).shares, torch.tensor([0.36, 0.64]).double())
