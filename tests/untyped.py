"""What users pass by mistake is refused in one sentence with the remedy, at every door.

`test_arguments.py` runs these tests without the run-time type checks of the other tests, as users have none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lazyscope as ls
from lazyscope.arguments import check_count, check_list, check_number
from lazyscope.errors import LazyscopeError

D = torch.float64
random = torch.Generator().manual_seed(0)
X = torch.randn(8, 3, dtype=D, generator=random)
Y = torch.randn(8, 1, dtype=D, generator=random)
SQUARE = ls.loss.Square()


def net(hidden: int = 6) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, hidden), nn.Tanh(), nn.Linear(hidden, 1)).double()


def flows(**options: Any) -> dict[str, Callable[[], object]]:
    """The dynamics with some arguments, by name."""
    given = {"model": net(), "loss": SQUARE, "x": X, "y": Y, **options}
    timed = {"times": [0.0, 0.1], **given}
    return {
        "gradient_flow": lambda: ls.gradient_flow(**timed),
        "tangent_flow": lambda: ls.tangent_flow(**timed),
        "gradient_descent": lambda: ls.gradient_descent(**{"lr": 0.1, "steps": 2, **given}),
    }


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"loss": nn.MSELoss()}, r"The loss is a MSELoss, .* pass lazyscope.loss.Square"),
    ({"loss": "mse"}, "The loss is a str"),
    ({"loss": None}, "The loss is a NoneType"),
    ({"loss": ls.loss.Square}, "The loss is a ABCMeta"),
    ({"model": None}, "The model is a NoneType; pass an nn.Module"),
    ({"model": nn.Linear}, "The model is the class Linear; pass an nn.Module"),
    ({"model": torch.relu}, "The model is a builtin_function_or_method"),
    ({"alpha": "a"}, "The scales α are 'a'; pass a number"),
    ({"alpha": [1.0, 2.0]}, "several scales α for one model; pass one number, or an Ensemble"),
    ({"y": Y + 1j}, "The targets are complex numbers; pass real ones"),
    ({"x": X.to_sparse()}, "The inputs are sparse tensors"),
    ({"x": torch.tensor(1.0)}, "The inputs are single numbers"),
    ({"tolerance": -1.0}, "tolerance=-1.0 is not a number that is finite and at least 0"),
    ({"tolerance": math.nan}, "tolerance=nan is not"),
]


@pytest.mark.parametrize(("options", "says"), WRONG)
@pytest.mark.parametrize("name", ["gradient_flow", "tangent_flow", "gradient_descent"])
def test_dynamics(name: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(LazyscopeError, match=says):
        flows(**options)[name]()


@pytest.mark.parametrize("times", [None, "1", ["a"], {0.0, 1.0}, [1j]])
def test_times(times: Any) -> None:
    for name in ("gradient_flow", "tangent_flow"):
        with pytest.raises(LazyscopeError, match="The times are"):
            flows(times=times)[name]()


@pytest.mark.parametrize("name", ["gradient_flow", "tangent_flow"])
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rtol": math.nan}, "rtol=nan is not"),
        ({"rtol": "a"}, "rtol='a' is not"),
        ({"atol": -1.0}, "atol=-1.0 is not"),
        ({"atol": 0.0}, "atol is 0"),
    ],
)
def test_tolerances(name: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(LazyscopeError, match=says):
        flows(**options)[name]()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lr": "a"}, "The step sizes are 'a'"),
        ({"steps": 2.5}, "steps=2.5 is not an integer"),
        ({"momentum": "a"}, "momentum='a' is not a number"),
        ({"record": 3.5}, "The steps to record are 3.5"),
        ({"record": [math.nan]}, "The steps to record are"),
        ({"schedule": lambda step: -1.0}, "A factor of the schedule=-1.0 is not"),
        ({"schedule": lambda step: math.nan}, "A factor of the schedule=nan is not"),
    ],
)
def test_descent(options: dict[str, Any], says: str) -> None:
    with pytest.raises(LazyscopeError, match=says):
        flows(**options)["gradient_descent"]()


def test_batches_of_a_descent() -> None:
    def descend(sampler: Any, loss: ls.loss.Loss = SQUARE, y: Any = Y, **options: Any) -> object:
        return ls.stochastic_gradient_descent(net(), loss, X, y, sampler=sampler, lr=0.1, steps=3, **options)

    with pytest.raises(LazyscopeError, match="The sampler is a tuple; pass one that draws"):
        descend((X, Y))
    with pytest.raises(LazyscopeError, match="seed=None is not an int"):
        descend(ls.Minibatches(X, Y, 4), seed=None)
    with pytest.raises(LazyscopeError, match=r"size=2\.5 is not an integer"):
        ls.Minibatches(X, Y, 2.5)  # type: ignore[arg-type]
    with pytest.raises(LazyscopeError, match="dim=3 does not count samples"):
        ls.Minibatches(X, Y, 2, dim=3)
    signs = Y.sign()
    with pytest.raises(LazyscopeError, match="-1"):  # labels of a later draw that are 0 and 1
        descend(lambda k, _: (X, signs if k == 0 else (signs + 1) / 2), ls.loss.Logistic(), signs)


SOLVERS: list[tuple[dict[str, Any], str]] = [
    ({"ridge": [0.1, 1.0]}, r"ridge=\[0.1, 1.0\] is not a number"),
    ({"ridge": None}, "ridge=None is not a number"),
    ({"batch": 2.5}, "batch=2.5 is not an integer"),
    ({"tolerance": "a"}, "tolerance='a' is not a number"),
    ({"y": Y * 1e155}, "the square of that cannot be represented; scale the targets"),
    ({"y": Y * 1e-200, "centred": True}, "the square of that cannot be represented; scale the targets"),
    ({"checkpoint": 1}, "The checkpoint 1 is not the name of a file"),
    ({"checkpoint": ""}, "The checkpoint '' is not the name of a file"),
]


@pytest.mark.parametrize(("options", "says"), SOLVERS)
def test_tangent_solve(options: dict[str, Any], says: str) -> None:
    with pytest.raises(LazyscopeError, match=says):
        ls.tangent_solve(**{"model": net(), "x": X, "y": Y, **options})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch": True}, "batch=True is not an integer"),
        ({"epochs": "a"}, "epochs='a' is not an integer"),
        ({"deflated": 2.5}, "deflated=2.5 is not an integer"),
        ({"seed": None}, "seed=None is not an integer"),
        ({"seed": 2**70}, "has more than 64 bits"),
        ({"acceleration": None}, "acceleration=None is not a number"),
    ],
)
def test_tangent_sgd(options: dict[str, Any], says: str) -> None:
    with pytest.raises(LazyscopeError, match=says):
        ls.tangent_sgd(net(), X, Y, **options)


def test_a_folder_is_no_checkpoint_and_stays_where_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    for solve in (ls.tangent_sgd, ls.tangent_solve):
        with pytest.raises(LazyscopeError, match="is a folder; pass a file"):
            solve(net(), X, Y, checkpoint=folder)
    assert list(tmp_path.iterdir()) == [folder]


def test_a_solution() -> None:
    solution = ls.tangent_solve(net(), X, Y, ridge=0.1)
    for values in (None, "1", [1j]):
        with pytest.raises(LazyscopeError, match="The ridges are"):
            solution.path(values)  # type: ignore[arg-type]
    for at in (solution.flow([1.0]), {name: w.numpy() for name, w in solution.v.items()}):
        with pytest.raises(LazyscopeError, match="one tensor for each parameter"):
            solution.predict(X, at=at)  # type: ignore[arg-type]
    with pytest.raises(LazyscopeError, match="not finite, real numbers"):
        solution.predict(X, at={name: w * math.nan for name, w in solution.v.items()})
    with pytest.raises(LazyscopeError, match=r"probes=2\.5 is not an integer"):
        solution.leave_one_out(probes=2.5)  # type: ignore[arg-type]
    curve = solution.path([0.1])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        calls: list[Callable[[], object]] = [
            lambda: solution.predict(X),
            lambda: solution.flow([1.0]),
            lambda: solution.path([0.1]),
            lambda: curve.outputs,
        ]
        for call in calls:
            with pytest.raises(LazyscopeError, match=r"torch\.autocast is enabled and would round the result"):
                call()
    torch.testing.assert_close(curve.outputs[0], solution.predict(X))


def test_displaced_models() -> None:
    model = ls.Model(net())
    for params in (None, {}, {name: w.numpy() for name, w in model.params.items()}):
        with pytest.raises(LazyscopeError, match="not one tensor for each of the parameters"):
            model.at(params)  # type: ignore[arg-type]


def test_kernel_regression() -> None:
    for ridge in ([0.1, 1.0], "0.1", None):
        with pytest.raises(LazyscopeError, match="is not a number"):
            ls.kernel_regression(net(), X, Y, ridge=ridge)  # type: ignore[arg-type]
    with pytest.raises(LazyscopeError, match=r"The kernel is torch.bfloat16, .* pass the model and its inputs"):
        ls.kernel_regression(net().bfloat16(), X.bfloat16(), Y, ridge=0.1)
    kernel = ls.tangent_kernel(ls.Model(net()), X, outputs="trace")
    fit = ls.kernel_regression(kernel, None, Y, ridge=0.1)
    with pytest.raises(LazyscopeError, match="between the new points and those of the fit"):
        fit.predict(torch.full((2, 8), math.nan, dtype=D))
    for options in ({"tolerance": 2.0}, {"tolerance": math.nan}, {"iterations": 0}):
        with pytest.raises(LazyscopeError, match="is not a"):
            ls.kernel_regression(kernel, None, Y, ridge=0.1, **options)


@pytest.mark.parametrize("metric", ["adam", torch.optim.Adam, 1, [1.0], {"0.weight": 1.0}])
def test_metrics(metric: Any) -> None:
    with pytest.raises(LazyscopeError, match=r"The metric is .*; pass"):
        ls.relative_scale(net(), X, Y, metric=metric)


def test_a_metric_that_is_zero() -> None:
    trained = net()
    with pytest.raises(LazyscopeError, match="The metric is zero, so that nothing moves"):
        ls.relative_scale(trained, X, Y, metric=torch.optim.SGD(trained.parameters(), lr=0.0))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"starts": 0}, "starts=0 is not an integer"),
        ({"iterations": -1}, "iterations=-1 is not an integer"),
        ({"seed": -1}, "seed=-1 is not an integer"),
        ({"tolerance": math.nan}, "tolerance=nan is not"),
        ({"batch": 1.5}, "batch=1.5 is not an integer"),
    ],
)
def test_relative_scale(options: dict[str, Any], says: str) -> None:
    with pytest.raises(LazyscopeError, match=says):
        ls.relative_scale(net(), X, Y, **options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"n": [4.9, 5.9]}, "A value of n=4.9 is not an integer"),
        ({"lr": ["a", "b"]}, "The values of lr are"),
        ({"lr": [0.1, 0.2], "steps": 0}, "steps=0 is not an integer"),
        ({"lr": [0.1, 0.2], "validation": (X,)}, "not a pair of inputs and targets"),
        ({"lr": [0.1, 0.2], "y": None}, "The targets are a NoneType"),
        ({"lr": [0.1, 0.2], "y": "abc"}, "The targets are a str"),
    ],
)
def test_phases(options: dict[str, Any], says: str) -> None:
    given = {"net": net(), "x": X, "y": Y, "alpha": [1.0, 2.0], "steps": 2, **options}
    with pytest.raises(LazyscopeError, match=says):
        ls.phases(**given)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lr": 0.0}, "lr=0 trains nothing"),
        ({"lr": math.nan}, "lr=nan is not"),
        ({"steps": 2.5}, "steps=2.5 is not an integer"),
        ({"widths": 8}, "The widths are 8; pass a list"),
        ({"widths": [4.0, 8.0, 16.0]}, "One of the widths=4.0 is not an integer"),
        ({"layers": []}, "no layers to compare"),
    ],
)
def test_coordinate_check(options: dict[str, Any], says: str) -> None:
    given = {"factory": net, "widths": [4, 8, 16], "x": X, "y": Y, "lr": 0.1, **options}
    with pytest.raises(LazyscopeError, match=says):
        ls.coordinate_check(**given)


def test_parametrisations() -> None:
    def transposed(width: int) -> nn.Module:
        return nn.Sequential(nn.ConvTranspose2d(3, width, 2), nn.Tanh(), nn.ConvTranspose2d(width, 1, 2))

    with pytest.raises(LazyscopeError, match="transposed convolution '0'"):
        ls.parametrise(transposed(16), "mup", transposed(4))
    with pytest.raises(LazyscopeError, match="lazy modules"):
        ls.parametrise(nn.LazyLinear(3), "mup", nn.LazyLinear(3))
    with pytest.raises(LazyscopeError, match=r"The base has '3.bias'"):
        ls.parametrise(net(8), "mup", nn.Sequential(*net(4), nn.Linear(1, 1)))  # type: ignore[misc]


def test_comparisons() -> None:
    for unseen in (X * math.nan, X[:0]):
        with pytest.raises(LazyscopeError, match="inputs"):
            ls.compare(net(), SQUARE, X, Y, alpha=1.0, times=[0.1], unseen=unseen)
    for alpha in (1e-320, 1e-300):
        with pytest.raises(LazyscopeError):
            ls.certify(net(), SQUARE, X, Y, alpha=alpha)


def test_monitors() -> None:
    given: list[tuple[dict[str, Any], str]] = [
        ({"columns": 0}, "columns=0 is not an integer"),
        ({"every": 2.5}, "every=2.5 is not an integer"),
        ({"optimiser": torch.optim.SGD}, "The optimiser is"),
    ]
    for options, says in given:
        with pytest.raises(LazyscopeError, match=says):
            ls.Monitor(net(), X, Y, **options)
    with pytest.raises(LazyscopeError, match="inputs are empty"):
        ls.Monitor(net(), X[:0], Y[:0])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"steps": 2.5}, "steps=2.5 is not an integer"),
        ({"points": "a"}, "points='a' is not an integer"),
        ({"seconds": "a"}, "seconds='a' is not a number"),
        ({"seed": 1.5}, "seed=1.5 is not an integer"),
        ({"alphas": 2.0}, "The scales alphas are 2.0"),
        ({"alphas": "ab"}, "The scales alphas are 'ab'"),
    ],
)
def test_inspections(options: dict[str, Any], says: str) -> None:
    with pytest.raises(LazyscopeError, match=says):
        ls.inspect(net(), X, Y, **options)


def test_numbers_in_any_form_pass() -> None:
    for number in (1, 0.5, np.float32(0.5), torch.tensor(0.5), math.inf):
        check_number("a", number)
    for count in (1, np.int64(3), torch.tensor(4)):
        check_count("a", count)
    for values in ([1, 2.0], np.arange(3), torch.ones(2), (0.0,)):
        check_list("a", values)
    check_list("a", 1.0, ndim=None)
    flows(times=np.array([0.0, 0.1]), rtol=np.float64(1e-3))["gradient_flow"]()
