"""The tangent model solved without its kernel, against the dense closed form.

Longer than 350 lines because solutions, flows, checkpoints, memory and refusals share their problems.
"""

from __future__ import annotations

import itertools
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
from lazyscope.errors import InputError, StoreError
from lazyscope.flow.checkpoint import Checkpoint, DamagedCheckpoint
from lazyscope.linalg.krylov import Krylov
from lazyscope.linalg.operator import Dense, Operator
from lazyscope.progress import quiet
from lazyscope.solve import tangent
from lazyscope.solve.left_out import probed_left_out
from lazyscope.solve.notice import announce

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


@settings(deadline=None, max_examples=6)
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
@pytest.mark.parametrize("iterations", [1, 2, 3, 6, 12])
def test_errors_of_few_iterations_are_within_their_bounds(n: int, iterations: int) -> None:
    for seed in range(3):
        model, (x, y) = network(4, 10, 1, seed), data(n, 4, 1, seed)
        twin = Twin(model, x, y)
        solution = tangent.tangent_solve(model, x, y, iterations=iterations)
        assert solution.iterations == min(iterations, n)
        flow, path = solution.flow([0.01, *TIMES[1:]]), solution.path([0.0, *RIDGES])
        for time, outputs, bound in zip([0.01, *TIMES[1:]], flow.outputs, flow.error, strict=True):
            missed = float((outputs.flatten() - twin.start - twin.jacobian @ twin.flow(time)).norm())
            assert missed <= float(bound) + 1e-9
        if iterations > 2:
            assert float(flow.error[1]) < 1e-3 * float(twin.missed.norm()), "the bound says something at early times"
        for ridge, outputs, bound in zip([0.0, *RIDGES], path.outputs, path.error, strict=True):
            missed = float((outputs.flatten() - twin.start - twin.jacobian @ twin.ridge(ridge)).norm())
            assert missed <= float(bound) + 1e-9


@settings(deadline=None, max_examples=30)
@given(
    st.integers(1, 15), st.integers(1, 15), st.integers(1, 3), st.sampled_from([0.0, 1e-3, 1.0]), st.integers(0, 999)
)
def test_bounds_hold_whatever_the_norm_of_the_operator(n: int, p: int, size: int, shift: float, seed: int) -> None:
    """The largest singular vectors are only a small part of these right-hand sides, so few iterations miss them."""
    random = torch.Generator().manual_seed(seed)
    left = torch.linalg.qr(torch.randn(n, n, generator=random, dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(p, p, generator=random, dtype=torch.float64))[0]
    count = min(n, p)
    sizes = 10 ** (4 * torch.rand(count, generator=random, dtype=torch.float64) - 2)
    parts = torch.randn(n, generator=random, dtype=torch.float64)
    parts[:count] *= sizes.clamp(min=1) ** -1.5
    krylov = Krylov(Dense((left[:, :count] * sizes) @ right[:, :count].T), left @ parts)
    for _ in range(size):
        krylov.extend()
    projection = krylov.project()
    for time in (0.0, 1e-5, 1e-3, 0.1, 1.0, 100.0, 1e4, 1e8, math.inf):
        rates = sizes**2 + shift
        true = sizes**2 / rates * -torch.expm1(-rates * time) * parts[:count]
        found = krylov.image(projection.flow(time, shift))
        assert float((left[:, :count] @ true - found).norm()) <= projection.flow_error(time, shift) + 1e-9


def test_slow_directions_that_are_not_found_yet_show_in_the_bound() -> None:
    linear = nn.Linear(3, 1, bias=False).double()
    x, y = torch.diag(torch.tensor([1.0, 1e-3, 1e-4]).double()), torch.ones(3, 1).double()
    flow = tangent.tangent_solve(linear, x, y, iterations=1, centred=True).flow([1e10, math.inf])
    assert bool((flow.error >= (flow.outputs - y).flatten(1).norm(dim=1) - 1e-4).all())
    assert float((flow.outputs - y).norm()) > 1.4


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
    beside = (30 + 61) * (5 + 10) * 8
    solution = tangent.tangent_solve(model, x, y, ridge=1e-2, memory=beside + 8 * 12 * (30 + 61), iterations=2000)
    assert solution.converged
    assert close(flat(solution.v), twin.ridge(1e-2), 1e-7)
    with pytest.raises(InputError, match="larger `memory`"):
        solution.flow([1.0])


def test_memory_below_the_least_is_refused_with_the_least() -> None:
    model, (x, y) = network(4, 10, 1, 0), data(30, 4, 1, 1)
    least = 8 * (4 + 15) * (30 + 61)
    with pytest.raises(InputError, match=f"memory={least - 1}; pass memory={least} or more"):
        tangent.tangent_solve(model, x, y, memory=least - 1)
    solution = tangent.tangent_solve(model, x, y, memory=least, iterations=10)
    assert (solution.iterations, solution.memory) == (10, 0)
    assert tangent.tangent_solve(model, x, y, iterations=17).memory == 17 * 8 * (30 + 61)


def test_vectors_beyond_the_device_go_to_the_host() -> None:
    """On a CPU both are the same memory, but the blocks are taken separately, and none is longer than is needed."""
    model, (x, y) = network(4, 10, 1, 0), data(30, 4, 1, 1)
    each = 8 * (30 + 61)
    near = tangent.tangent_solve(model, x, y, memory=(5 + 15) * each, host=20 * each, iterations=22)
    krylov = near._krylov
    assert krylov is not None
    for basis in (krylov.state()["left"], krylov.state()["right"]):
        assert [len(part) for part in basis] == [5, 16, 1]
    assert krylov.memory == 22 * each
    assert close(flat(near.v), flat(tangent.tangent_solve(model, x, y, iterations=22).v), 1e-12)


def test_long_iterations_are_announced(capsys: pytest.CaptureFixture[str]) -> None:
    announce("tangent model (3 vectors take 2 MB at most)", 59.0)
    with quiet():
        announce("tangent model (3 vectors take 2 MB at most)", 3600.0)
    assert capsys.readouterr().err == ""
    announce("tangent model (3 vectors take 2 MB at most)", 75.0)
    assert capsys.readouterr().err == "lazyscope: tangent model (3 vectors take 2 MB at most), 1:15 at most\n"


def test_a_run_that_was_stopped_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    model, (x, y) = network(4, 10, 1, 0), data(30, 4, 1, 1)
    whole = tangent.tangent_solve(model, x, y, iterations=20)
    tangent.tangent_solve(model, x, y, iterations=9, checkpoint=tmp_path / "half.pt", every=4)
    resumed = tangent.tangent_solve(model, x, y, iterations=20, checkpoint=tmp_path / "half.pt", every=4)
    assert resumed.iterations == whole.iterations
    assert torch.equal(flat(resumed.v), flat(whole.v))
    with pytest.raises(InputError, match="other data"):
        tangent.tangent_solve(model, x, y + 1, checkpoint=tmp_path / "half.pt")


def test_a_checkpoint_belongs_to_one_model_and_its_data(tmp_path: Path) -> None:
    """With centring, the first right-hand side is the targets alone, whatever the model and the inputs."""
    model, (x, y) = network(4, 10, 1, 0), data(30, 4, 1, 1)
    other = Model(nn.Sequential(nn.Linear(4, 10), nn.GELU(), nn.Linear(10, 1))).double()
    same = Model(nn.Sequential(nn.Linear(4, 10), nn.GELU(), nn.Linear(10, 1)).double())
    same = same.at(dict(model.params))
    path = tmp_path / "half.pt"

    def solve(model: Model, x: Any, ridge: float = 0.0) -> tangent.TangentSolution:
        target = None if isinstance(x, DataLoader) else y
        return tangent.tangent_solve(
            model, x, target, iterations=9, checkpoint=path, every=4, centred=True, ridge=ridge, batch=8
        )

    solve(model, x)
    for changed in ((other, x), (same, x), (model, x + 1), (network(4, 12, 1, 0), x), (model, x, 0.1)):
        with pytest.raises(InputError, match="belongs to another model or to other data"):
            solve(*changed)
    loaded = solve(model, DataLoader(TensorDataset(x, y), batch_size=5))
    assert close(flat(loaded.v), flat(solve(model, x).v), 1e-12)
    with Checkpoint(path) as stored:
        stored.save({"name": "another"})
    with pytest.warns(DamagedCheckpoint, match="does not contain an iteration"):
        assert solve(model, x).iterations == 9


def test_checkpoints_that_cannot_be_written_are_refused_before_the_start(tmp_path: Path) -> None:
    model, (x, y) = network(3, 4, 1, 0), data(5, 3, 1, 1)
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"cannot be written .*; pass a file"):
        tangent.tangent_solve(model, x, y, checkpoint=tmp_path / "file" / "c.pt")
    with pytest.raises(StoreError, match="is a folder; pass a file"):
        tangent.tangent_solve(model, x, y, checkpoint=tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_leaving_one_point_out_is_fitting_the_others() -> None:
    model, (x, y) = network(3, 8, 2, 0), data(6, 3, 2, 1)
    found = tangent.tangent_solve(model, x, y, ridge=0.1).leave_one_out()
    missed = 0.0
    for i in range(6):
        rest = torch.arange(6) != i
        # n · ridge is what the points share, so that leaving one out does not change the kernel's shift
        without = tangent.tangent_solve(model, x[rest], y[rest], ridge=0.1 * 6 / 5)
        missed += float((without.predict(x[~rest]) - y[~rest]).square().sum()) / (2 * 6)
    assert found.loss == pytest.approx(missed, rel=1e-8)
    sizes = Twin(model, x, y).sizes ** 2
    assert found.freedom == pytest.approx(float((sizes / (sizes + 0.6)).sum()), rel=1e-9)
    assert found.error == 0.0


@pytest.mark.parametrize("ridge", [1e-2, 1e-3])
def test_left_out_losses_of_ten_outputs_with_default_arguments(ridge: float) -> None:
    """Blocks of 10 × 10 outputs, for which 20 random probes are nearly singular; in float32 and from a loader too."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 10))
    x, y = (t.float() for t in data(30, 16, 10, 0))
    model = Model(net).double()
    twin = Twin(model, x.double(), y.double())
    inverse = torch.linalg.inv(twin.jacobian @ twin.jacobian.T + 30 * ridge * torch.eye(300, dtype=torch.float64))
    c = inverse @ (y.double().flatten() - twin.start)
    left = [torch.linalg.solve(inverse[at : at + 10, at : at + 10], c[at : at + 10]) for at in range(0, 300, 10)]
    true = sum(float(each.square().sum()) for each in left) / 60
    loader = DataLoader(TensorDataset(x, y), batch_size=7)
    for solution in (
        tangent.tangent_solve(model, x.double(), y, ridge=ridge, iterations=3),
        tangent.tangent_solve(net, loader, ridge=ridge, iterations=3),
    ):
        assert solution.leave_one_out().loss == pytest.approx(true, rel=1e-8)


def test_probes_estimate_cross_validation_with_its_error() -> None:
    model, (x, y) = network(3, 8, 2, 0), data(20, 3, 2, 1)
    solution = tangent.tangent_solve(model, x, y, ridge=0.1)
    true, missed = solution.leave_one_out(), (y - solution.outputs).flatten()
    for seed in range(2):
        found = probed_left_out(solution._problem.jacobian, missed, 20 * 0.1, 30, seed)
        assert abs(found.freedom - true.freedom) <= 4 * found.error < 0.5 * true.freedom
        assert abs(found.gcv / true.gcv - 1) <= 10 * found.error / (40 - true.freedom)
        with pytest.raises(InputError, match="use `gcv`"):
            _ = found.loss
    with pytest.raises(InputError, match="at least two probes"):
        solution.leave_one_out(probes=1)
    with pytest.raises(InputError, match="at least two probes"):
        tangent.tangent_solve(model, x, y).leave_one_out()


def test_nothing_to_fit() -> None:
    model, (x, _) = network(3, 8, 1, 0), data(6, 3, 1, 1)
    solution = tangent.tangent_solve(model, x, model(x).detach())
    assert solution.converged
    assert float(flat(solution.v).abs().max()) == 0.0
    for curve in (solution.flow([0.0, 1.0, math.inf]), solution.path([0.0, 1.0, 2.0])):
        assert all(float(flat(v).abs().max()) == 0.0 for v in curve.v)
        assert torch.equal(curve.outputs, model(x).detach().expand(3, 6, 1))
        assert float(curve.error.max()) == 0.0
    assert solution.largest == 0.0


def test_a_start_that_vanishes_at_the_training_points_is_added_elsewhere() -> None:
    linear = nn.Linear(2, 1, bias=False).double()
    x, new = torch.zeros(3, 2, dtype=torch.float64), torch.ones(2, 2, dtype=torch.float64)
    solution = tangent.tangent_solve(linear, x, torch.ones(3, 1))
    torch.testing.assert_close(solution.predict(new), linear(new).detach())


def test_a_space_that_rounding_makes_imprecise_is_kept_for_the_flow(tmp_path: Path) -> None:
    """The solution takes another space for what rounding has left."""
    torch.manual_seed(0)
    model = Model(nn.Sequential(nn.Linear(2, 10), nn.GELU(), nn.Linear(10, 2))).double()
    x, y = data(20, 2, 2, 0)
    twin, solution = Twin(model, x, y), tangent.tangent_solve(model, x, y)
    assert solution.converged
    assert solution.iterations > solution._krylov.size  # type: ignore[union-attr]
    flow = solution.flow(TIMES)
    for time, outputs in zip(TIMES, flow.outputs, strict=True):
        assert close(outputs.flatten(), twin.start + twin.jacobian @ twin.flow(time))
    late = solution.iterations - 2
    tangent.tangent_solve(model, x, y, iterations=late, checkpoint=tmp_path / "late.pt", every=late)
    resumed = tangent.tangent_solve(model, x, y, checkpoint=tmp_path / "late.pt", every=10**6)
    assert torch.equal(flat(resumed.v), flat(solution.v))
    assert torch.equal(resumed.flow(TIMES).outputs, flow.outputs)
    assert resumed.largest == solution.largest


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"ridge": -1.0}, "not negative"),
        ({"iterations": 0}, "at least 1"),
        ({"y": torch.zeros(3, 1)}, r"shape \(6, 1\)"),
        ({"y": torch.full((6, 1), math.nan)}, "NaN"),
        ({"memory": "much"}, "2GB"),
        ({"host": "much"}, "host='much' is not an amount .* host="),
        ({"tolerance": -1.0}, "tolerance=-1.0 is not a number that is at least 0"),
        ({"tolerance": math.nan}, "tolerance=nan is not a number that is at least 0"),
        ({"tolerance": math.inf}, "tolerance=inf is not a number that is at least 0"),
        ({"every": 0}, "every=0 is not an integer that is at least 1"),
        ({"every": -1}, "every=-1 is not an integer that is at least 1"),
        ({"rounded": torch.float8_e4m3fn}, "pass torch.float16"),
        ({"rounded": torch.int32}, "pass torch.float16"),
        ({"y": torch.zeros(6, 1, dtype=torch.complex64)}, "real ones"),
    ],
)
def test_misuse_names_the_remedy(changes: dict[str, Any], match: str) -> None:
    model, (x, y) = network(3, 8, 1, 0), data(6, 3, 1, 1)
    with pytest.raises(InputError, match=match):
        tangent.tangent_solve(model, x, **{"y": y, **changes})


def test_no_points_are_told() -> None:
    with pytest.raises(InputError, match="pass at least one"):
        tangent.tangent_solve(network(3, 8, 1, 0), torch.zeros(0, 3).double(), torch.zeros(0, 1))


def test_misuse_of_a_solution_names_the_remedy() -> None:
    model, (x, y) = network(3, 8, 1, 0), data(6, 3, 1, 1)
    solution = tangent.tangent_solve(model, x, y)
    for ridges in ([], [-1.0], [math.nan], [[0.1]]):
        with pytest.raises(InputError, match="pass a list of finite numbers"):
            solution.path(torch.tensor(ridges))
    with pytest.raises(InputError, match=r"differ in the names \['0.bias', .*; pass one tensor for each"):
        solution.predict(x, at={"a": torch.ones(1)})
    with pytest.raises(InputError, match=r"0.weight has shape \(1,\), and the parameter \(8, 3\)"):
        solution.predict(x, at={name: torch.ones(1) for name in model.params})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_models_in_half_precision_are_fitted_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1)).to(dtype)
    x, y = (t.to(dtype) for t in data(12, 20, 1, 0))
    true = tangent.tangent_solve(Model(net).to(dtype=torch.float32), x.float(), y.float())
    assert true.converged
    for found in (
        tangent.tangent_solve(net, x, y),
        tangent.tangent_solve(net, DataLoader(TensorDataset(x, y), batch_size=12)),
    ):
        assert found.converged
        assert close(flat(found.v), flat(true.v), 1e-6)
        torch.testing.assert_close(found.predict(x), true.predict(x.float()))


def test_rough_products_still_give_the_best_solution_in_their_space() -> None:
    """Transposed products with errors along the largest singular vectors, as TF32 makes them on images."""
    random = torch.Generator().manual_seed(0)
    rows, columns = 60, 90
    left = torch.linalg.qr(torch.randn(rows, rows, generator=random, dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(columns, rows, generator=random, dtype=torch.float64))[0]
    sizes = torch.arange(1.0, rows + 1, dtype=torch.float64) ** -1.0
    sizes[:3] = 600.0
    matrix = (left * sizes) @ right.T

    class Rough(Operator):
        shape, dtype, device = (rows, columns), torch.float64, torch.device("cpu")

        def matmat(self, u: Tensor) -> Tensor:
            out: Tensor = matrix @ u
            return out

        def rmatmat(self, v: Tensor) -> Tensor:
            noise = torch.randn(3, v.shape[1], generator=random, dtype=torch.float64)
            out: Tensor = matrix.T @ v + 1e-3 * right[:, :3] @ noise
            return out

    b = torch.randn(rows, generator=random, dtype=torch.float64)
    krylov, left_over = Krylov(Rough(), b), []
    for _ in range(40):
        krylov.extend()
        projection = krylov.project()
        v = krylov.combine(projection.solution(0.0))
        left_over.append(float((b - matrix @ v).norm() / b.norm()))
        images = matrix @ torch.cat(krylov.state()["right"]).T
        best = images @ torch.linalg.lstsq(images, b[:, None], driver="gelsd").solution[:, 0]
        assert left_over[-1] == pytest.approx(float((b - best).norm() / b.norm()), rel=1e-6)
    assert all(late <= early * (1 + 1e-9) for early, late in itertools.pairwise(left_over))
    assert left_over[-1] < 0.5


def test_products_in_bfloat16_are_corrected_up_to_their_precision() -> None:
    """The outputs are those of the exact model at the v found; v is the best of a space of rounded vectors."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 3))
    x, y = (t.float() for t in data(100, 20, 3, 0))
    rough = tangent.tangent_solve(net, x, y, centred=True, rounded=torch.bfloat16, iterations=40)
    exact = tangent.tangent_solve(net, x, y, centred=True, iterations=40)
    assert rough.memory == 40 * (300 * 4 + rough._problem.jacobian.shape[1] * 2)
    assert exact.memory == 40 * (300 * 4 + rough._problem.jacobian.shape[1] * 4)
    total = float(y.square().sum()) / 200
    missed, best = math.sqrt(rough.loss / total), math.sqrt(exact.loss / total)
    assert best <= missed <= best + 5 * torch.finfo(torch.bfloat16).eps
    dense = Model(net).double().jacobian(x.double()) @ flat(rough.v).double()
    assert (rough.outputs.flatten() - dense).norm() <= 1e-5 * dense.norm()
    basis = torch.cat(rough._krylov.state()["right"]).double()  # type: ignore[union-attr]
    assert (basis @ basis.T - torch.eye(40, dtype=torch.float64)).abs().max() <= 5e-3


def test_fewer_iterations_give_the_flow_of_a_smaller_space() -> None:
    model, (x, y) = network(4, 16, 2, 0), data(20, 4, 2, 0)
    large, small = (tangent.tangent_solve(model, x, y, iterations=m, tolerance=0.0) for m in (12, 7))
    for one, other in zip(large.flow(TIMES[:5], iterations=7).v, small.flow(TIMES[:5]).v, strict=True):
        assert torch.allclose(flat(one), flat(other), atol=1e-10)
    assert torch.allclose(large.flow(TIMES[:5], iterations=7).error, small.flow(TIMES[:5]).error, rtol=1e-6, atol=1e-12)
    with pytest.raises(InputError, match="There are 12 iterations"):
        large.flow(TIMES, iterations=13)


def test_the_last_direction_speeds_up_a_restarted_iteration() -> None:
    random = torch.Generator().manual_seed(0)
    left = torch.linalg.qr(torch.randn(80, 80, generator=random, dtype=torch.float64))[0]
    sizes = torch.cat([torch.linspace(300, 600, 6), torch.linspace(0.1, 2, 74)]).double()
    matrix = (left * sizes) @ left.T
    b, zero = torch.randn(80, generator=random, dtype=torch.float64), torch.zeros(80, dtype=torch.float64)

    def after(kept: bool) -> float:
        krylov, v = Krylov(Dense(matrix), b), zero
        for _ in range(12):
            while krylov.size < 12:
                krylov.extend()
            direction = krylov.project().solution(0.0)
            v = v + krylov.combine(direction)
            missed = b - matrix @ v
            krylov.restart(missed, matrix.T @ missed, v, direction * float(kept))
        return float((b - matrix @ v).norm() / b.norm())

    assert after(True) < 0.5 * after(False)


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


def test_the_largest_eigenvalue_is_that_of_the_kernel() -> None:
    model, (x, y) = network(3, 6, 2, seed=1), data(12, 3, 2, seed=1)
    jacobian = model.jacobian(x)
    largest = float(torch.linalg.eigvalsh(jacobian @ jacobian.T)[-1])
    assert tangent.tangent_solve(model, x, y).largest == pytest.approx(largest, rel=1e-9)
    assert tangent.tangent_solve(model, x, y, iterations=2).largest <= largest * (1 + 1e-9), "a lower bound"
