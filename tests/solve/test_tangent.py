"""The tangent model solved without its kernel, against the dense closed form."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lazyscope import Linearised, Model
from lazyscope.errors import InputError
from lazyscope.linalg.nystrom import Nystrom
from lazyscope.linalg.operator import Symmetric
from lazyscope.linalg.residual import MinimalResiduals, RefinedResiduals
from lazyscope.solve import tangent

TIMES = [0.0, 0.1, 1.0, 10.0, 1e3, 1e6, math.inf]
RIDGES = [1e-6, 1e-3, 1.0]


def network(inputs: int, width: int, outputs: int, seed: int) -> Model:
    torch.manual_seed(seed)
    return Model(nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, outputs))).double()


def data(n: int, inputs: int, outputs: int, seed: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(n, inputs, generator=random, dtype=torch.float64)
    return x, torch.randn(n, outputs, generator=random, dtype=torch.float64)


class Twin:
    """The dense closed form, by the singular values of the Jacobian."""

    def __init__(self, model: Model, x: Tensor, y: Tensor) -> None:
        self.n, self.jacobian = len(x), model.jacobian(x)
        self.left, self.sizes, self.right = torch.linalg.svd(self.jacobian, full_matrices=False)
        self.start = model(x).detach().flatten()
        self.missed = self.left.T @ (y.flatten() - self.start)
        self.null = self.sizes <= 1e-12 * self.sizes.max()

    def v(self, factor: Tensor) -> Tensor:
        v: Tensor = self.right.T @ (factor.masked_fill(self.null, 0.0) * self.missed)
        return v

    def ridge(self, ridge: float) -> Tensor:
        return self.v(self.sizes / (self.sizes**2 + self.n * ridge))

    def flow(self, time: float) -> Tensor:
        grown = -torch.expm1(-(self.sizes**2) * time / self.n) if math.isfinite(time) else torch.ones_like(self.sizes)
        return self.v(grown / self.sizes.masked_fill(self.null, 1.0))


def flat(v: Any) -> Tensor:
    return torch.cat([each.flatten() for each in v.values()])


def close(found: Tensor, true: Tensor, tolerance: float = 1e-8) -> bool:
    return float((found - true).norm()) <= tolerance * max(1e-12, float(true.norm()))


@settings(deadline=None, max_examples=12)
@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 6), st.integers(1, 3), st.integers(0, 999))
def test_the_solution_is_that_of_the_closed_form(n: int, inputs: int, width: int, outputs: int, seed: int) -> None:
    model, (x, y) = network(inputs, width, outputs, seed), data(n, inputs, outputs, seed)
    twin = Twin(model, x, y)
    kept = twin.sizes[~twin.null]
    for ridge in RIDGES if float(kept.min() / kept.max()) < 1e-4 else [0.0, *RIDGES]:
        solution = tangent.tangent_solve(model, x, y, ridge=ridge)
        assert solution.converged
        assert close(flat(solution.v), twin.ridge(ridge), 1e-7 if ridge == 0 else 1e-8)


@pytest.mark.parametrize("n", [4, 40], ids=["fewer outputs than parameters", "more outputs than parameters"])
def test_flow_and_ridges_come_from_one_space(n: int) -> None:
    model, (x, y) = network(3, 5, 2, 0), data(n, 3, 2, 1)
    twin = Twin(model, x, y)
    solution = tangent.tangent_solve(model, x, y)
    flow = solution.flow(TIMES)
    for time, v, outputs in zip(TIMES, flow.v, flow.outputs, strict=True):
        assert close(flat(v), twin.flow(time))
        assert close(outputs.flatten(), twin.start + twin.jacobian @ twin.flow(time))
    path = solution.path([0.0, *RIDGES])
    for ridge, v in zip([0.0, *RIDGES], path.v, strict=True):
        assert close(flat(v), twin.ridge(ridge))


def test_the_flow_of_a_regularised_loss() -> None:
    model, (x, y) = network(3, 5, 1, 0), data(6, 3, 1, 1)
    twin, ridge = Twin(model, x, y), 0.1
    flow = tangent.tangent_solve(model, x, y, ridge=ridge).flow(TIMES)
    for time, v in zip(TIMES, flow.v, strict=True):
        rates = twin.sizes**2 / twin.n + ridge
        grown = -torch.expm1(-rates * time) if math.isfinite(time) else torch.ones_like(rates)
        assert close(flat(v), twin.v(grown * twin.sizes / twin.n / rates))


@pytest.mark.parametrize("n", [10, 60])
@pytest.mark.parametrize("iterations", [3, 6, 12])
def test_errors_of_few_iterations_are_within_their_bounds(n: int, iterations: int) -> None:
    model, (x, y) = network(4, 10, 1, 0), data(n, 4, 1, 1)
    twin = Twin(model, x, y)
    solution = tangent.tangent_solve(model, x, y, iterations=iterations)
    assert solution.iterations == min(iterations, n)
    flow, path = solution.flow(TIMES[1:-1]), solution.path(RIDGES)
    for time, outputs, bound in zip(TIMES[1:], flow.outputs, flow.error, strict=False):
        missed = float((outputs.flatten() - twin.start - twin.jacobian @ twin.flow(time)).norm())
        assert missed <= float(bound) + 1e-10
    assert float(flow.error[0]) < 1e-3 * float(twin.missed.norm()), "the bound says something at early times"
    for ridge, outputs, bound in zip(RIDGES, path.outputs, path.error, strict=True):
        missed = float((outputs.flatten() - twin.start - twin.jacobian @ twin.ridge(ridge)).norm())
        assert missed <= float(bound) + 1e-10


def test_it_predicts_and_loads_into_the_linearised_module() -> None:
    model, (x, y) = network(3, 8, 2, 0), data(6, 3, 2, 1)
    solution = tangent.tangent_solve(model, x, y)
    lazy = Linearised(model)
    lazy.load_state_dict(dict(solution.v), strict=False)
    new = data(5, 3, 2, 7)[0]
    torch.testing.assert_close(solution.predict(new), lazy(new).detach())
    torch.testing.assert_close(solution.predict(x), y)
    assert solution.loss < 1e-18


def test_centred_models_leave_out_the_start() -> None:
    model, (x, y) = network(3, 8, 1, 0), data(6, 3, 1, 1)
    solution = tangent.tangent_solve(model, x, y, centred=True)
    torch.testing.assert_close(solution.predict(x), y)
    torch.testing.assert_close(model.jacobian(x) @ flat(solution.v), y.flatten())


def test_single_precision_reaches_its_tolerance() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 3))
    x, y = torch.randn(20, 4), torch.arange(20) % 3
    solution = tangent.tangent_solve(net, x, y, ridge=1e-3)
    assert solution.converged
    wide = tangent.tangent_solve(Model(net).double(), x.double(), y, ridge=1e-3)
    assert close(flat(solution.v).double(), flat(wide.v), 1e-3)


def test_little_memory_starts_again_from_the_residual() -> None:
    model, (x, y) = network(4, 10, 1, 0), data(30, 4, 1, 1)
    twin = Twin(model, x, y)
    solution = tangent.tangent_solve(model, x, y, ridge=1e-2, memory=2 * 8 * 30 * 6, iterations=2000)
    assert solution.converged
    assert close(flat(solution.v), twin.ridge(1e-2), 1e-7)
    with pytest.raises(InputError, match="larger `memory`"):
        solution.flow([1.0])


def test_a_run_that_was_stopped_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    model, (x, y) = network(4, 10, 1, 0), data(30, 4, 1, 1)
    whole = tangent.tangent_solve(model, x, y, iterations=20)
    tangent.tangent_solve(model, x, y, iterations=9, checkpoint=tmp_path / "half.pt", every=4)
    resumed = tangent.tangent_solve(model, x, y, iterations=20, checkpoint=tmp_path / "half.pt", every=4)
    assert resumed.iterations == whole.iterations
    assert torch.equal(flat(resumed.v), flat(whole.v))
    with pytest.raises(InputError, match="other data"):
        tangent.tangent_solve(model, x, y + 1, checkpoint=tmp_path / "half.pt")


def test_leave_one_out() -> None:
    model, (x, y) = network(3, 8, 2, 0), data(6, 3, 2, 1)
    found = tangent.tangent_solve(model, x, y, ridge=0.1).leave_one_out(probes=100)
    missed = 0.0
    for i in range(6):
        rest = torch.arange(6) != i
        # n · ridge is what the points share, so that leaving one out does not change the kernel's shift
        without = tangent.tangent_solve(model, x[rest], y[rest], ridge=0.1 * 6 / 5)
        missed += float((without.predict(x[~rest]) - y[~rest]).square().sum()) / (2 * 6)
    assert found.loss == pytest.approx(missed, rel=0.25)
    sizes = Twin(model, x, y).sizes ** 2
    assert found.freedom == pytest.approx(float((sizes / (sizes + 0.6)).sum()), rel=0.1)


def test_nothing_to_fit() -> None:
    model, (x, _) = network(3, 8, 1, 0), data(6, 3, 1, 1)
    solution = tangent.tangent_solve(model, x, model(x).detach())
    assert solution.converged
    assert float(flat(solution.v).abs().max()) == 0.0


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"ridge": -1.0}, "not negative"),
        ({"iterations": 0}, "positive number"),
        ({"y": torch.zeros(3, 1)}, r"shape \(6, 1\)"),
        ({"y": torch.full((6, 1), math.nan)}, "NaN"),
        ({"memory": "much"}, "2GB"),
    ],
)
def test_misuse_names_the_remedy(changes: dict[str, Any], match: str) -> None:
    model, (x, y) = network(3, 8, 1, 0), data(6, 3, 1, 1)
    with pytest.raises(InputError, match=match):
        tangent.tangent_solve(model, x, **{"y": y, **changes})


@pytest.mark.parametrize("ridge", [0.0, 1e-3])
def test_a_preconditioner_changes_the_work_and_not_the_solution(ridge: float) -> None:
    model, (x, y) = network(6, 20, 2, 0), data(16, 6, 2, 1)
    true = tangent.tangent_solve(model, x, y, ridge=ridge)
    found = tangent.tangent_solve(model, x, y, ridge=ridge, precondition=len(x) // 2)
    assert found.converged
    assert close(flat(found.v), flat(true.v), 1e-7)
    with pytest.raises(InputError, match="precondition=0"):
        found.flow([1.0])


def test_a_preconditioner_that_cannot_be_made_is_refused() -> None:
    model, (x, y) = network(6, 20, 2, 0), data(16, 6, 2, 1)
    with pytest.raises(InputError, match="cannot be drawn"):
        tangent.tangent_solve(model, x, y, precondition=len(x) + 1)
    narrow = Model(nn.Linear(2, 1)).double()
    with pytest.raises(InputError, match="precondition=0"):
        tangent.tangent_solve(narrow, *data(20, 2, 1, 0), precondition=3)


def test_a_preconditioned_iteration_resumes_to_the_same_bits(tmp_path: Path) -> None:
    model, (x, y) = network(6, 20, 2, 0), data(16, 6, 2, 1)
    whole = tangent.tangent_solve(model, x, y, precondition=5, tolerance=1e-8, every=3)
    path = tmp_path / "iteration"
    # Two inner iterations of three products, each followed by an exact one.
    tangent.tangent_solve(model, x, y, precondition=5, tolerance=1e-8, iterations=8, checkpoint=path, every=3)
    resumed = tangent.tangent_solve(model, x, y, precondition=5, tolerance=1e-8, checkpoint=path, every=3)
    assert all(torch.equal(resumed.v[name], each) for name, each in whole.v.items())


def test_rough_products_are_refined_to_the_accuracy_of_exact_ones() -> None:
    """Products with the rounding errors of TF32, an ill-conditioned kernel and its preconditioner."""
    random, n = torch.Generator().manual_seed(0), 300
    basis = torch.linalg.qr(torch.randn(n, n, generator=random, dtype=torch.float64))[0]
    values = 1e3 * torch.arange(1.0, n + 1, dtype=torch.float64) ** -1.0
    values[0] = 3e5
    kernel = (basis * values) @ basis.T

    class Rough(Symmetric):
        shape, dtype, device = (n, n), torch.float64, torch.device("cpu")

        def matmat(self, u: Tensor) -> Tensor:
            out: Tensor = kernel @ (u + 5e-4 * u.abs() * torch.randn(u.shape, generator=random, dtype=u.dtype))
            return out

    right = torch.randn(n, generator=random, dtype=torch.float64)
    places = torch.arange(0, n, 6)
    rough, precondition = Rough(), Nystrom(kernel[:, places], places)
    refined = RefinedResiduals(rough, lambda u: kernel @ u, right, tolerance=1e-6, precondition=precondition, fall=0.3)
    while not refined.done:
        refined.step()
    assert float((right - kernel @ refined.x).norm() / right.norm()) <= 1.1e-6
    alone = MinimalResiduals(rough, right, tolerance=1e-6, precondition=precondition)
    while alone.count < refined.count and not alone.done:
        alone.step()
    assert float((right - kernel @ alone.x()).norm() / right.norm()) > 1e-2, "without refinement the error remains"


def test_the_loss_falls_with_every_iteration() -> None:
    """The solution in a Krylov space of few dimensions can have a larger loss than the start; its minimiser cannot."""
    model, (x, y) = network(6, 40, 1, 0), data(30, 6, 1, 1)
    losses = [tangent.tangent_solve(model, 5 + x, y, iterations=count).loss for count in (1, 2, 4, 8, 16)]
    start = float((y - model(5 + x).detach()).square().sum()) / 60
    assert all(late <= early for early, late in zip([start, *losses], losses, strict=False))


def test_a_loader_gives_the_same_solution() -> None:
    model, (x, y) = network(3, 8, 2, 0), data(11, 3, 2, 1)
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    true, found = tangent.tangent_solve(model, x, y, batch=4), tangent.tangent_solve(model, loader)
    assert close(flat(found.v), flat(true.v), 1e-12)
    assert close(found.predict(x), true.predict(x), 1e-12)
    classes = DataLoader(TensorDataset(x, torch.arange(11) % 2), batch_size=4)
    rows = nn.functional.one_hot(torch.arange(11) % 2, 2)
    assert close(flat(tangent.tangent_solve(model, classes).v), flat(tangent.tangent_solve(model, x, rows).v))


def test_loaders_that_give_other_batches_each_time_are_refused() -> None:
    model, (x, y) = network(3, 8, 2, 0), data(11, 3, 2, 1)
    pairs = TensorDataset(x, y)
    with pytest.raises(InputError, match="shuffle=False"):
        tangent.tangent_solve(model, DataLoader(pairs, batch_size=4, shuffle=True))
    with pytest.raises(InputError, match="shuffle=False"):
        tangent.tangent_solve(model, DataLoader(pairs, batch_size=4, drop_last=True))
    with pytest.raises(InputError, match="must be pairs"):
        tangent.tangent_solve(model, DataLoader(TensorDataset(x), batch_size=4))
    with pytest.raises(InputError, match="There are no targets"):
        tangent.tangent_solve(model, x)
    with pytest.raises(InputError, match="pass tensors"):
        tangent.tangent_solve(model, DataLoader(pairs, batch_size=4), precondition=3)
