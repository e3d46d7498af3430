"""The inverse relative scale κ and its factors against known values, dense tensors and the laws of section 1.2."""

from __future__ import annotations

import itertools
import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import lazyscope as ls
from lazyscope.errors import InputError, ModelError, ScaleError
from lazyscope.linalg.bilinear import DenseBilinear, bilinear_norm
from lazyscope.loss import CrossEntropy
from lazyscope.model.base import Model
from lazyscope.model.jacobian import SecondDerivative
from lazyscope.model.neuron_curvature import curvature_norm
from lazyscope.model.two_layer import TwoLayer
from lazyscope.theory.relative_scale import KinkWarning, relative_scale

SEEDS = st.integers(0, 10_000)
ACTIVATIONS = st.sampled_from([torch.tanh, torch.sin, torch.erf, torch.sigmoid])


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def as_model(net: TwoLayer) -> Model:
    return Model(lambda w, x: net.activation(x @ w["b"].mT) @ w["a"], net.params)


def dense_norm(form: SecondDerivative, seed: int = 1) -> float:
    """The reference: gradient ascent on the dense tensor of second derivatives, from 64 other starts."""
    return bilinear_norm(form.to_dense(), starts=64, seed=seed).value


@given(SEEDS)
@settings(max_examples=10, deadline=None)
def test_linear_maps_have_no_curvature(seed: int) -> None:
    model = Model(lambda w, x: x @ w["w"], {"w": draw(seed, 4)})
    x, y = draw(seed + 1, 6, 4), draw(seed + 2, 6)
    found = relative_scale(model, x, y)
    assert found.hessian_norm == 0
    assert found.kappa == 0
    assert found.jacobian_norm == pytest.approx(float(torch.linalg.matrix_norm(x, 2)) / math.sqrt(6), rel=1e-6)


@given(SEEDS, st.integers(1, 7))
@settings(max_examples=7, deadline=None)
def test_quadratic_forms(seed: int, p: int) -> None:
    """For h(w) = ½wᵀAw on one point, ‖D²h‖ = max|λ(A)| and ‖Dh‖ = |Aw₀|."""
    form = draw(seed, p, p)
    form = form + form.T
    start = draw(seed + 1, p)
    model = Model(lambda w, x: 0.5 * x * (w["w"] @ form @ w["w"]), {"w": start})
    found = relative_scale(model, torch.ones(1, dtype=torch.float64), draw(seed + 2, 1))
    assert found.hessian_norm == pytest.approx(float(torch.linalg.eigvalsh(form).abs().max()), rel=1e-6)
    assert found.jacobian_norm == pytest.approx(float((form @ start).norm()), rel=1e-6)
    residual = abs(float(0.5 * start @ form @ start - draw(seed + 2, 1)[0]))
    assert found.kappa == pytest.approx(residual * found.hessian_norm / found.jacobian_norm**2, rel=1e-6)


@given(SEEDS, st.integers(1, 5))
@settings(max_examples=7, deadline=None)
def test_products(seed: int, d: int) -> None:
    """For h(a, b) = a(b·x), D²h(u, u) = 2u_a(u_b·x) has the norm λ_max(C)^½ with C = (1/n) Σ xxᵀ."""
    x, a, b = draw(seed, 8, d), draw(seed + 1, 1), draw(seed + 2, d)
    model = Model(lambda w, x: w["a"] * (x @ w["b"]), {"a": a, "b": b})
    found = relative_scale(model, x, torch.zeros(8, dtype=torch.float64))
    top = math.sqrt(float(torch.linalg.eigvalsh(x.T @ x / 8)[-1]))
    assert found.hessian_norm == pytest.approx(top, rel=1e-6)
    jacobian = torch.cat([(x @ b)[:, None], a * x], 1)
    assert found.jacobian_norm == pytest.approx(float(torch.linalg.matrix_norm(jacobian, 2)) / math.sqrt(8), rel=1e-6)


@given(SEEDS, ACTIVATIONS, st.integers(1, 3), st.integers(1, 3), st.integers(1, 4))
@settings(max_examples=6, deadline=None)
def test_two_layer_blocks_agree_with_the_dense_tensor(seed: int, activation: object, m: int, d: int, n: int) -> None:
    net = TwoLayer.gaussian(m, d, [seed], activation=activation)[0].to(torch.float64)  # type: ignore[arg-type]
    x, y = draw(seed, n, d), draw(seed + 1, n)
    exact = relative_scale(net, x, y)
    model = as_model(net)
    form = SecondDerivative(model, x)
    assert exact.hessian_norm == pytest.approx(dense_norm(form) / math.sqrt(n), rel=1e-6)
    matrix_free = relative_scale(model, x, y)
    assert matrix_free.jacobian_norm == pytest.approx(exact.jacobian_norm, rel=1e-6)
    assert matrix_free.residual == pytest.approx(exact.residual, rel=1e-6)
    assert matrix_free.kappa == pytest.approx(exact.kappa, rel=1e-6)


@given(SEEDS)
@settings(max_examples=10, deadline=None)
def test_products_agree_with_the_dense_twin(seed: int) -> None:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    form = SecondDerivative(net, draw(seed, 5, 2), batch=2)
    dense = form.to_dense()
    u, v, g = draw(seed, 3, form.shape[1]), draw(seed + 1, 3, form.shape[1]), draw(seed + 2, 3, form.shape[0])
    torch.testing.assert_close(form.pair(u, v), dense.pair(u, v), atol=1e-12, rtol=1e-10)
    torch.testing.assert_close(form.contract(g, u), dense.contract(g, u), atol=1e-12, rtol=1e-10)
    torch.testing.assert_close(dense.pair(u, v), torch.einsum("kij,si,sj->sk", dense.tensor, u, v))


@pytest.mark.slow
def test_large_models_are_searched_matrix_free() -> None:
    """Above the size of dense tensors, the norm is that of the second derivative in the direction found."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 3)).double()
    x = draw(0, 30, 8)
    found = relative_scale(net, x, draw(1, 30, 3))
    form = SecondDerivative(net, x, batch=7)
    again = form.pair(found.search.direction[None], found.search.direction[None])
    assert found.search.status == "converged"
    assert found.search.residual < 1e-6
    assert float(again.norm()) / math.sqrt(30) == pytest.approx(found.hessian_norm, rel=1e-9)


def test_ascent_is_monotone_and_finds_the_top_of_a_matrix() -> None:
    tensor = draw(3, 1, 30, 30)
    form = DenseBilinear(tensor)
    rough = [bilinear_norm(form, starts=1, iterations=k, seed=5).value for k in range(12)]
    assert all(after >= before * (1 - 1e-12) for before, after in itertools.pairwise(rough))
    assert bilinear_norm(form).value == pytest.approx(
        float(torch.linalg.eigvalsh(form.tensor[0]).abs().max()), rel=1e-9
    )
    assert bilinear_norm(form, starts=1, iterations=1).status == "horizon"


def test_relu_says_what_it_means() -> None:
    net = TwoLayer.gaussian(5, 3, [0])[0].to(torch.float64)
    x, y = draw(0, 6, 3), draw(1, 6)
    with pytest.warns(KinkWarning, match="kinks"):
        exact = relative_scale(net, x, y)
    with pytest.warns(KinkWarning, match="kinks"):
        searched = relative_scale(as_model(net), x, y)
    assert "kinks" in exact.notice
    assert exact.notice in str(exact)
    assert searched.kappa == pytest.approx(exact.kappa, rel=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not relative_scale(TwoLayer.gaussian(5, 3, [0], activation=torch.tanh)[0], x, y).notice


@given(SEEDS, st.floats(0.01, 100))
@settings(max_examples=10, deadline=None)
@pytest.mark.slow
def test_laws_of_scaling(seed: int, factor: float) -> None:
    """The methods of the result agree with the models that they describe."""
    net = TwoLayer.gaussian(4, 2, [seed], activation=torch.square)[0].to(torch.float64)  # a(b·x)² is 3-homogeneous
    x, y = draw(seed, 5, 2), draw(seed + 1, 5)
    found = relative_scale(net, x, y)
    model = Model(lambda w, x: factor * (torch.square(x @ w["b"].mT) @ w["a"]), net.params)
    assert found.scaled(factor).kappa == pytest.approx(relative_scale(model, x, y).kappa, rel=1e-5)
    moved = TwoLayer(factor * net.a, factor * net.b, torch.square)
    assert found.started_at(factor, 3).kappa == pytest.approx(relative_scale(moved, x, y).kappa, rel=1e-5)
    assert found.centred().scaled(found.lazy_scale(0.01)).kappa == pytest.approx(0.01, rel=1e-9)


def test_widening_is_the_leading_order() -> None:
    """The prediction from m = 200 to 3200 neurons, with the scaling 1/√m, equals the median of new networks."""
    x, y = nn.functional.normalize(draw(0, 20, 5), dim=1), draw(1, 20)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KinkWarning)
        small = [relative_scale(TwoLayer.gaussian(200, 5, [s])[0], x, y).scaled(200**-0.5) for s in range(15)]
        large = [relative_scale(TwoLayer.gaussian(3200, 5, [s])[0], x, y).scaled(3200**-0.5) for s in range(15, 30)]
    predicted = torch.tensor([r.widened(16, -0.5).kappa for r in small]).median()
    assert float(torch.tensor([r.kappa for r in large]).median()) == pytest.approx(float(predicted), rel=0.15)


def test_classes_stand_for_one_hot_rows() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, labels = draw(0, 6, 3), torch.tensor([0, 1, 2, 2, 1, 0])
    hot = nn.functional.one_hot(labels, 3).double()
    assert relative_scale(net, x, labels).kappa == pytest.approx(relative_scale(net, x, hot).kappa, rel=1e-9)


def test_doors() -> None:
    net, x = nn.Linear(3, 2), torch.ones(4, 3)
    with pytest.raises(InputError, match="reshape"):
        relative_scale(net, x, torch.zeros(4))
    with pytest.raises(InputError, match="NaN"):
        relative_scale(net, x, torch.full((4, 2), math.nan))
    with pytest.raises(InputError, match="0 … 1"):
        relative_scale(net, x, torch.tensor([0, 1, 2, 0]))
    with pytest.raises(ModelError, match="choose one"):
        relative_scale(TwoLayer.gaussian(3, 2, [0, 1]), torch.ones(4, 2), torch.zeros(4))
    with pytest.raises(ModelError, match="another initialisation"):
        relative_scale(Model(lambda w, x: w["w"] ** 2 * x, {"w": torch.zeros(1)}), torch.ones(2), torch.ones(2))
    with pytest.raises(ScaleError, match="positive"):
        relative_scale(net, x, torch.zeros(4, 2)).scaled(math.inf)


def test_public_name() -> None:
    assert ls.relative_scale is relative_scale
    assert curvature_norm(TwoLayer.gaussian(3, 2, [0])[0], torch.ones(2, 2)).status == "converged"


def tagger() -> tuple[Model, Tensor, Tensor]:
    """Three padded sequences of four positions with five classes. All positions of the last one are ignored."""
    model = Model(lambda w, x: torch.tanh(x @ w["a"]) @ w["b"], {"a": draw(0, 3, 2), "b": draw(1, 2, 5)})
    target = torch.tensor([[1, 0, 4, 2], [3, 3, -100, -100], [-100] * 4])
    return model, draw(2, 3, 4, 3), target


def test_ignored_positions_leave_all_norms() -> None:
    model, x, target = tagger()
    found = relative_scale(model, x, target, loss=CrossEntropy(ignore_index=-100))
    kept = target != -100
    outputs, hot = model(x)[kept], nn.functional.one_hot(target[kept], 5)
    rows = model.jacobian(x).reshape(3, 4, 5, -1)[kept].flatten(0, 1)
    dense = SecondDerivative(model, x).to_dense().tensor.reshape(3, 4, 5, *[16] * 2)[kept].flatten(0, 1)
    assert found.residual == pytest.approx(float((outputs - hot).norm()) / math.sqrt(2), rel=1e-12)
    assert found.jacobian_norm == pytest.approx(float(torch.linalg.matrix_norm(rows, 2)) / math.sqrt(2), rel=1e-9)
    reference = bilinear_norm(DenseBilinear(dense), starts=64, seed=1).value
    assert found.hessian_norm == pytest.approx(reference / math.sqrt(2), rel=1e-6)
    assert found.scaled(3.0).residual == pytest.approx(float((3 * outputs - hot).norm()) / math.sqrt(2), rel=1e-12)


def test_targets_may_be_arrays_and_lists() -> None:
    model, x, target = tagger()
    expected = relative_scale(model, x, target, loss=CrossEntropy(ignore_index=-100))
    for given_ in (target.numpy(), target.tolist()):
        assert relative_scale(model, x, given_, loss=CrossEntropy(ignore_index=-100)).kappa == expected.kappa
    y = draw(3, 3, 4, 5)
    assert relative_scale(model, x, y.numpy()).kappa == relative_scale(model, x, y).kappa


def test_ignored_classes_need_the_word() -> None:
    model, x, target = tagger()
    with pytest.raises(InputError, match="ignore_index=-100"):
        relative_scale(model, x, target)
    with pytest.raises(InputError, match="probabilities"):
        relative_scale(model, x, draw(3, 3, 4, 5), loss=CrossEntropy(ignore_index=-100))
    with pytest.raises(InputError, match="not numbers"):
        relative_scale(model, x, ["a", "b", "c"])
