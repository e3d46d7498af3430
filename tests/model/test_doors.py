"""Invalid models and inputs raise an error of one sentence that names the remedy."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from tests.model import zoo
from torch import Tensor, nn

from lazyscope import Ensemble, Model, Scaled
from lazyscope.errors import InputError, LazyscopeError, ModelError, ScaleError


def one_sentence(error: pytest.ExceptionInfo[LazyscopeError]) -> bool:
    text = str(error.value)
    return "\n" not in text and text.endswith(".")


@pytest.mark.parametrize("alpha", [0.0, -1.0, math.nan])
def test_scales_that_are_not_positive(alpha: float) -> None:
    net, x = zoo.build("relu")
    with pytest.raises(ScaleError, match="pass α > 0") as error:
        Scaled(net, alpha)
    assert one_sentence(error)
    with pytest.raises(ScaleError, match="pass α > 0"):
        Model(net).coordinates(x, alpha)


def test_an_infinite_output_is_refused() -> None:
    net, x = zoo.build("relu")
    with pytest.raises(ScaleError, match="Linearised"):
        Scaled(net, math.inf, centred=False)
    with pytest.raises(ScaleError, match="Symmetrised"):
        Model(net).coordinates(x, math.inf)


@pytest.mark.parametrize(
    ("net", "remedy"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), "net.eval()"),
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)), "net.eval()"),
        (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False)).eval(), "GroupNorm"),
        (nn.ReLU(), "requires_grad=True"),
        (nn.LazyLinear(3), "run it once"),
    ],
)
def test_modules_that_are_no_functions_of_their_parameters(net: nn.Module, remedy: str) -> None:
    with pytest.raises(ModelError) as error:
        Model(net)
    assert remedy in str(error.value)
    assert one_sentence(error)


def test_evaluation_mode_and_zero_dropout_are_fine() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5)).eval()
    assert Scaled(net, 10.0)(torch.ones(3, 2)).shape == (3, 2)
    assert Scaled(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)), 10.0)(torch.ones(3, 2)).shape == (3, 2)


def test_frozen_parameters_do_not_move() -> None:
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    net[0].requires_grad_(False)
    lazy = Scaled(net, 10.0)
    assert [name for name, _ in lazy.named_parameters()] == ["2.weight", "2.bias"]
    net.requires_grad_(False)
    with pytest.raises(ModelError, match="no trainable parameters"):
        Model(net)


class Noisy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5)


class Counting(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.count: Tensor
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x) * self.count


class Branching(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if y.sum() > 0 else -y


class Pair(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y, y  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("net", "remedy"),
    [
        (Noisy(2, 2), "random numbers"),
        (Counting(), "remove the update"),
        (Branching(2, 2), "torch.where"),
        (Pair(2, 2), "wrap it"),
    ],
)
def test_forwards_that_cannot_be_followed(net: nn.Module, remedy: str) -> None:
    with pytest.raises(ModelError, match=remedy) as error:
        Scaled(net, 10.0)(torch.ones(3, 2))
    assert one_sentence(error)


@pytest.mark.parametrize(
    ("x", "remedy"),
    [
        (torch.full((3, 5), math.nan), "NaN"),
        (torch.full((3, 5), math.inf), "infinity"),
        (torch.ones(3, 4), "check the shape"),
        (torch.ones(3, 5, dtype=torch.int64), r"x\.to\(torch\.float32\)"),
        (torch.ones(3, 5, dtype=torch.float64), r"x\.to\(torch\.float32\)"),
        ([[1.0] * 5], "torch.as_tensor"),
        (torch.ones(3, 5, device="meta"), "move one to the other"),
    ],
)
def test_inputs_that_do_not_fit(x: Tensor, remedy: str) -> None:
    net, _ = zoo.build("relu")
    with pytest.raises(InputError, match=remedy) as error:
        Scaled(net, 10.0)(x)
    assert one_sentence(error)


def test_integer_inputs_are_right_for_embeddings() -> None:
    net, x = zoo.build("transformer")
    assert Scaled(net, 10.0)(x).dtype == torch.float32


def test_functions_need_parameters_and_modules_bring_their_own() -> None:
    with pytest.raises(ModelError, match="Model\\(f, params\\)"):
        Model(lambda w, x: x)
    with pytest.raises(ModelError, match="brings its own"):
        Model(nn.Linear(2, 2), {"w": torch.ones(2)})
    with pytest.raises(ModelError, match="dict of tensors"):
        Model(lambda w, x: x, {"w": 3.0})
    with pytest.raises(ModelError, match="floating-point"):
        Model(lambda w, x: x, {"w": torch.ones(2, dtype=torch.int64)})


def test_an_output_without_parameters_is_refused() -> None:
    with pytest.raises(ModelError, match="does not depend"):
        Scaled(Model(lambda w, x: x * 2.0, {"w": torch.ones(2)}), 1.0)(torch.ones(3))


def test_several_inputs_by_position_and_by_name() -> None:
    net = nn.Bilinear(2, 3, 4)
    a, b = torch.randn(5, 2), torch.randn(5, 3)
    by_position, by_name = (
        Scaled(net, 7.0, centred=False)((a, b)),
        Scaled(net, 7.0, centred=False)({"input1": a, "input2": b}),
    )
    torch.testing.assert_close(by_position, 7.0 * net(a, b))
    torch.testing.assert_close(by_name, by_position)


def test_ensembles_of_unequal_models_are_refused() -> None:
    with pytest.raises(ModelError, match="group them"):
        Ensemble([nn.Linear(2, 2), nn.Linear(2, 3)])
    with pytest.raises(ModelError, match="non-empty"):
        Ensemble([])
    with pytest.raises(ScaleError, match="one for each model"):
        Ensemble([nn.Linear(2, 2)]).coordinates(torch.ones(1, 2), [1.0, 2.0])
