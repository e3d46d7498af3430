"""Structured tangent kernels agree with the float64 contraction of Jacobians."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tangent.architectures import ARCHITECTURES, FOREIGN, build, cast, contraction, error, part
from torch import Tensor, nn

from lazyscope import Model
from lazyscope.errors import InputError, ModelError
from lazyscope.model.vgg import vgg11
from lazyscope.tangent import tangent_kernel
from lazyscope.tangent.gram import Pairing, add_pairs, add_relay, add_slabs
from lazyscope.tangent.outer import Dense, OneHot, Outer
from lazyscope.tangent.sample_graph import SampleGraph

BOUND = {torch.float64: 1e-10, torch.float32: 1e-4}


def check(name: str) -> None:
    model, x = build(name, 4)
    x1, x2 = part(x, slice(0, 3)), part(x, slice(2, 4))
    whole = contraction(model, x, x)
    square, cross, k = whole[:3, :3], whole[:3, 2:], whole.shape[-1]
    for dtype, bound in BOUND.items():
        rounded, a, b = model.to(dtype), cast(x1, dtype), cast(x2, dtype)
        found = tangent_kernel(rounded, a)
        assert found.dtype == dtype
        assert found.shape == (3, 3, k, k)
        assert error(found, square) < bound
        assert torch.equal(found, found.permute(1, 0, 3, 2))
        assert error(tangent_kernel(rounded, a, b), cross) < bound
        assert error(tangent_kernel(rounded, a, outputs="trace"), square.diagonal(dim1=2, dim2=3).mean(-1)) < bound
        assert error(tangent_kernel(rounded, a, b, outputs="sum"), cross.sum((2, 3))) < bound
        layers = tangent_kernel(rounded, a, b, by_layer=True)
        assert list(layers) == list(model.params)
        assert error(torch.stack(list(layers.values())).sum(0), cross) < bound
    assert error(tangent_kernel(model, x1, x2, memory=10_000), cross) < 1e-10
    assert error(tangent_kernel(model, x1, memory=10_000), square) < 1e-10


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "resnet18" else ()) for name in ARCHITECTURES]
)
def test_kernel_equals_the_contraction_of_jacobians(name: str) -> None:
    check(name)


@pytest.mark.parametrize("name", FOREIGN)
def test_kernel_of_models_from_libraries(name: str) -> None:
    try:
        importlib.import_module(f"{name}.models")
    except (ImportError, RuntimeError) as reason:
        pytest.skip(f"{name} does not import here: {reason}")
    check(name)


def test_kernel_of_each_parameter_is_that_of_its_jacobian() -> None:
    model, x = build("transformer", 3)
    jacobian = torch.func.jacrev(lambda w: model(x, w))(dict(model.params))
    for name, kernel in tangent_kernel(model, x, by_layer=True).items():
        flat = jacobian[name].flatten(2)
        reference = torch.einsum("iap,jbp->ijab", flat, flat)
        assert float((kernel - reference).abs().max()) <= 1e-10 * float(reference.abs().max()), name


@pytest.mark.parametrize("name", ["resnet18", "transformer", "batch-norm", "group-layer-norm", "filters", "attention"])
def test_outputs_pulled_back_together_or_one_by_one(name: str) -> None:
    model, x = build(name, 3)
    sample_graph = SampleGraph.of(model, x)
    seeds = torch.eye(sample_graph.k, dtype=torch.float64)
    one, many = (
        sample_graph.features(x, seeds, chunk=c, together=t).gradients for c, t in ((2, 1), (3, sample_graph.k))
    )
    for node, gradient in one.items():
        assert torch.allclose(gradient, many[node], rtol=1e-10, atol=1e-12)


def test_positive_semidefinite_to_rounding() -> None:
    model, x = build("batch-norm", 12, torch.float32)
    kernel = tangent_kernel(model, torch.cat([x, x]))  # its rank is at most half its size
    matrix = kernel.transpose(1, 2).reshape(24 * 3, 24 * 3)
    values = torch.linalg.eigvalsh(matrix.double())
    assert values[0] > -1e-5 * values[-1]


def test_a_function_and_its_parameters() -> None:
    def forward(w: Any, x: Tensor) -> Tensor:
        bump: Tensor = torch.exp(-((x - w["centre"]) ** 2).sum(-1)) * w["height"]
        return torch.einsum("ni,ij,nj->n", x, w["form"], x) + bump

    params = {"form": torch.randn(4, 4), "centre": torch.randn(4), "height": torch.randn(())}
    model = Model(forward, {name: w.double() for name, w in params.items()})
    x = torch.randn(5, 4, dtype=torch.float64)
    assert error(tangent_kernel(model, x), contraction(model, x, x)) < 1e-10


def test_a_module_passes_as_it_is_and_stays_as_it_is() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    before = copy.deepcopy(net.state_dict())
    x = torch.randn(5, 3)
    assert torch.equal(tangent_kernel(net, x), tangent_kernel(Model(net), x))
    assert all(torch.equal(net.state_dict()[name], w) for name, w in before.items())
    assert all(w.grad is None for w in net.parameters())


def test_changed_parameters_are_seen() -> None:
    model = Model(nn.Linear(3, 1).double())
    x = torch.randn(2, 3, dtype=torch.float64)
    quadratic = Model(lambda w, x: (x @ w["w"]) ** 2, {"w": torch.ones(3, dtype=torch.float64)})
    tangent_kernel(quadratic, x)
    quadratic.params["w"].mul_(2.0)
    assert error(tangent_kernel(quadratic, x), contraction(quadratic, x, x)) < 1e-10
    assert error(tangent_kernel(model, x)[..., 0, 0], x @ x.T + 1) < 1e-10


def test_frozen_parameters_count_for_nothing() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    net[0].requires_grad_(False)
    x = torch.randn(5, 3, dtype=torch.float64)
    assert list(tangent_kernel(net, x, by_layer=True)) == ["2.weight", "2.bias"]
    assert error(tangent_kernel(net, x), contraction(Model(net), x, x)) < 1e-10


def test_output_that_does_not_depend_on_the_input() -> None:
    model = Model(lambda w, x: w["w"].expand(len(x), 2) * 1.0, {"w": torch.ones(2, dtype=torch.float64)})
    x = torch.randn(3, 1, dtype=torch.float64)
    assert error(tangent_kernel(model, x), contraction(model, x, x)) < 1e-10


def test_float32_holds_over_long_sums() -> None:
    net = vgg11(width=0.25, outputs=2, seed=0)
    x = torch.randn(4, 3, 32, 32)
    assert error(tangent_kernel(net, x), tangent_kernel(net.double(), x.double())) < 1e-5


sizes = st.integers(1, 4)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_all_orders_of_summation_agree(data: st.DataObject) -> None:
    n1, n2, k, groups, p1, p2, o, d = (data.draw(sizes, label) for label in "n1 n2 k groups p1 p2 o d".split())
    symmetric, bias, hot = data.draw(st.booleans()), data.draw(st.booleans()), data.draw(st.booleans())
    limit = data.draw(st.sampled_from([1, 300, 3000, 10**6]))
    torch.manual_seed(n1 + 7 * k + 31 * p1)

    def factors(n: int, p: int) -> Outer:
        if hot:
            return Outer(OneHot(torch.randint(0, d, (n, p)), d), torch.randn(n, k, 1, p, o, dtype=torch.float64))
        left = Dense(torch.randn(n, groups, p, d, dtype=torch.float64))
        return Outer(left, torch.randn(n, k, groups, p, o, dtype=torch.float64), bias)

    one = factors(n1, p1)
    two = one if symmetric else factors(n2, p2)
    slab1, slab2 = (torch.cat(list(each.slabs(10**6)), 2) for each in (one, two))
    reference = torch.einsum("iap,jbp->iajb", slab1, slab2)
    pairing = Pairing(len(slab1), len(slab2), symmetric)
    side = len(slab1) * k
    upper = torch.ones(side, len(slab2) * k, dtype=torch.bool).triu() if symmetric else torch.tensor(True)
    for add in (add_slabs, add_pairs, add_relay):
        kernel = torch.zeros_like(reference)
        add(kernel, one, two, pairing, limit)
        difference = (kernel - reference).view(side, -1) * upper
        assert float(difference.abs().max()) < 1e-12 * (1 + float(reference.abs().max()))


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 2), sizes, st.integers(1, 2), st.integers(0, 2), st.integers(1, 2), sizes, st.integers(1, 3))
def test_convolutions_of_any_geometry(
    groups: int, channels: int, stride: int, padding: int, dilation: int, batch: int, taps: int
) -> None:
    torch.manual_seed(channels)
    net = nn.Sequential(
        nn.Conv1d(groups, groups * channels, taps, stride, padding, dilation, groups),
        nn.Tanh(),
        nn.Conv1d(groups * channels, 2, taps, stride, padding, dilation, groups if groups < 3 else 1),
    ).double()
    model = Model(net)
    x = torch.randn(batch + 1, groups, 13, dtype=torch.float64)
    assert error(tangent_kernel(model, x), contraction(model, x, x)) < 1e-10


class Mixing(nn.Module):
    """A model that subtracts the mean over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y - y.mean(0)


class Pooled(nn.Module):
    """A model with one output for the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y.sum()


NET = nn.Linear(3, 2)
X = torch.randn(4, 3)


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: tangent_kernel(Mixing(), X), ModelError, "other samples"),
        (lambda: tangent_kernel(Pooled(), X), ModelError, "one row for each sample"),
        (lambda: tangent_kernel(nn.Sequential(NET, nn.Dropout()), X), ModelError, "eval"),
        (lambda: tangent_kernel(nn.Sequential(NET, nn.BatchNorm1d(2)), X), ModelError, "eval"),
        (lambda: tangent_kernel(NET, X / 0), InputError, "NaN"),
        (lambda: tangent_kernel(NET, X, X / 0), InputError, "NaN"),
        (lambda: tangent_kernel(NET, X, torch.randn(4, 2)), InputError, "differ"),
        (lambda: tangent_kernel(NET, X, X.double()), InputError, "differ"),
        (lambda: tangent_kernel(NET, X.long()), InputError, "integers"),
        (lambda: tangent_kernel(NET, X.double()), InputError, "float32"),
        (lambda: tangent_kernel(NET, torch.randn(4, 5)), InputError, "shape"),
        (lambda: tangent_kernel(NET, X[:0]), InputError, "at least one"),
        (lambda: tangent_kernel(NET, X, memory=0), InputError, "memory"),
        (lambda: tangent_kernel(NET, X, outputs="all"), InputError, "trace"),  # type: ignore[call-overload]
        (lambda: tangent_kernel(nn.ReLU(), X), ModelError, "no trainable"),
    ],
)
def test_doors(call: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        call()
