"""The tangent operator agrees with dense Jacobians, in float64 over random models."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lazyscope.errors import InputError, ModelError
from lazyscope.model.base import Model
from lazyscope.model.jacobian import JacobianOperator
from lazyscope.tangent.operator import TangentOperator

ACTIVATIONS = (nn.Tanh, nn.ReLU, nn.GELU, nn.Softplus)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Model, torch.Tensor, int]:
    """Draw a dense or convolutional network of random shape, its inputs, and a batch size."""
    torch.manual_seed(draw(st.integers(0, 1000)))
    n, k, width = draw(st.integers(1, 6)), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    activation = draw(st.sampled_from(ACTIVATIONS))
    if draw(st.booleans()):
        body, x = [nn.Linear(3, width), activation(), nn.Linear(width, width, bias=False)], torch.randn(n, 3)
    else:
        convolution = nn.Conv2d(2, width, 3, stride=draw(st.integers(1, 2)), padding=1)
        body = [convolution, activation(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        x = torch.randn(n, 2, 4, 4)
    net = nn.Sequential(*body, activation(), nn.Linear(width, k))
    return Model(net).double(), x.double(), draw(st.integers(1, 7))


@settings(max_examples=15, deadline=None)
@given(case=cases())
def test_products_are_those_of_the_dense_twin(case: tuple[Model, torch.Tensor, int]) -> None:
    model, x, batch = case
    dense = model.jacobian(x)
    kernel = dense @ dense.T
    operator = TangentOperator(model, x, batch=batch)
    scale = float(kernel.abs().max())
    assert operator.shape == kernel.shape
    eye = torch.eye(len(kernel), dtype=torch.float64)
    torch.testing.assert_close(operator @ eye, kernel, rtol=1e-12, atol=1e-13 * scale)
    torch.testing.assert_close(operator @ eye[0], kernel[0], rtol=1e-12, atol=1e-13 * scale)
    torch.testing.assert_close(operator.to_dense(), kernel, rtol=1e-10, atol=1e-12 * scale)
    jacobian = operator.jacobian
    torch.testing.assert_close(jacobian.to_dense(), dense)
    v = torch.randn(dense.shape[1], 2, dtype=torch.float64)
    torch.testing.assert_close(jacobian @ v, dense @ v)
    u = torch.randn(len(dense), 2, dtype=torch.float64)
    torch.testing.assert_close(jacobian.rmatmat(u), dense.T @ u)


def test_scipy_sees_the_same_operator() -> None:
    model = Model(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))
    x = torch.randn(10, 4)
    operator = TangentOperator(model, x)
    u = np.random.default_rng(0).standard_normal((30, 2))
    np.testing.assert_allclose(operator.to_scipy() @ u, operator.to_dense().numpy() @ u, rtol=1e-4, atol=1e-5)
    assert operator.to_scipy().dtype == np.float64


class Attention(nn.Module):
    """A model with two inputs by name and an operation whose fused form has no forward-mode derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.inner = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        h = self.embed(tokens) * weight[..., None]
        out: torch.Tensor = self.inner(h, h, h, need_weights=False)[0]
        return out


def test_named_inputs_integers_attention_and_outputs_of_more_dimensions() -> None:
    torch.manual_seed(0)
    model = Model(Attention()).double()
    x = {"tokens": torch.randint(0, 7, (5, 3)), "weight": torch.randn(5, 3, dtype=torch.float64)}
    operator = TangentOperator(model, x, batch=2)
    assert operator.shape == (60, 60)
    dense = model.jacobian(x)
    u = torch.randn(60, dtype=torch.float64)
    torch.testing.assert_close(operator @ u, dense @ (dense.T @ u))


def test_a_function_and_a_bare_module_will_do() -> None:
    x = torch.randn(4, 3)
    weights = {"w": torch.randn(3, 2)}
    operator = TangentOperator(Model(lambda w, x: x @ w["w"], weights), x)
    torch.testing.assert_close(operator.to_dense(), torch.kron(x @ x.T, torch.eye(2)))
    assert TangentOperator(nn.Linear(3, 2), x).shape == (8, 8)


def test_misuse_names_the_remedy() -> None:
    net = nn.Linear(3, 2)
    with pytest.raises(InputError, match="positive size"):
        TangentOperator(net, torch.ones(2, 3), batch=0)
    with pytest.raises(InputError, match="first dimension"):
        TangentOperator(net, torch.ones(0, 3))
    with pytest.raises(InputError, match="first dimension"):
        JacobianOperator(Model(Attention()), {"tokens": torch.zeros(5, 3).long(), "weight": torch.ones(4, 3)})
    with pytest.raises(ModelError, match="first dimension be the points"):
        TangentOperator(Model(lambda w, x: (x @ w["w"]).sum(0), {"w": torch.ones(3, 2)}), torch.ones(4, 3))
    with pytest.raises(InputError, match="NaN"):
        TangentOperator(net, torch.full((2, 3), float("nan")))
    with pytest.raises(InputError, match="flatten outputs"):
        TangentOperator(net, torch.ones(2, 3)) @ torch.ones(2, 2)
