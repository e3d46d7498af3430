"""Scaled, Linearised and Symmetrised as ordinary modules: optimisers, state dicts, autocast, compilation."""

from __future__ import annotations

import io
import math
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest
import torch
from tests.model import zoo
from torch import Tensor, nn

from lazyscope import Linearised, Model, Scaled, Symmetrised, tangent_kernel
from lazyscope.errors import ModelError, ScaleError

OPTIMISERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.5),
}


def train(module: nn.Module, x: Tensor, y: Tensor, optimiser: torch.optim.Optimizer, steps: int = 40) -> list[float]:
    losses = []

    def closure() -> float:
        optimiser.zero_grad()
        loss = nn.functional.mse_loss(module(x), y)
        loss.backward()
        losses.append(loss.item())
        return losses[-1]

    for _ in range(steps):
        optimiser.step(closure)
    return losses


@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("alpha", [1.0, 1e5, math.inf])
def test_any_optimiser_trains_it(optimiser: str, alpha: float) -> None:
    net, x = zoo.build("tanh")
    module = Scaled(net, alpha)
    losses = train(module, x, torch.randn(7, 3), OPTIMISERS[optimiser](module.parameters()))
    assert losses[-1] < 0.5 * losses[0]


def test_descent_at_scale_one_is_that_of_the_module_itself() -> None:
    net, x = zoo.build("gelu")
    twin = Symmetrised(net)
    y = torch.randn(7, 3)
    scaled = Scaled(twin, 1.0)
    train(scaled, x, y, torch.optim.SGD(scaled.parameters(), lr=0.1))
    train(twin, x, y, torch.optim.SGD(twin.parameters(), lr=0.1))
    for name, weight in scaled.weights().items():
        torch.testing.assert_close(weight, twin.get_parameter(name).detach(), rtol=1e-4, atol=1e-5)


def test_weights_go_back_into_the_net() -> None:
    net, x = zoo.build("relu")
    lazy = Scaled(net, 10.0)
    start = net(x).detach()
    train(lazy, x, torch.randn(7, 3), torch.optim.SGD(lazy.parameters(), lr=0.05))
    net.load_state_dict(lazy.weights(), strict=False)
    torch.testing.assert_close(10.0 * (net(x) - start), lazy(x), rtol=1e-3, atol=1e-4)


def test_the_module_given_is_not_touched() -> None:
    net, x = zoo.build("relu")
    before = {name: p.clone() for name, p in net.state_dict().items()}
    lazy = Scaled(net, 10.0)
    train(lazy, x, torch.randn(7, 3), torch.optim.SGD(lazy.parameters(), lr=0.05))
    assert all(torch.equal(p, before[name]) for name, p in net.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in net.parameters())


@pytest.mark.parametrize("make", [lambda net: Scaled(net, 30.0), Linearised, lambda net: Scaled(net, math.inf)])
def test_state_dicts_round_trip(make: Callable[[nn.Module], nn.Module]) -> None:
    net, x = zoo.build("everything")
    module = make(net)
    assert [name for name, _ in module.named_parameters()] == [name for name, _ in net.named_parameters()]
    train(module, x, torch.randn(5, 2), torch.optim.SGD(module.parameters(), lr=0.01), steps=3)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other = make(zoo.Everything().eval())  # another initialisation, which the w₀ of the state dict replaces
    other.load_state_dict(torch.load(file, weights_only=True))
    torch.testing.assert_close(other(x), module(x), rtol=0.0, atol=0.0)


def test_the_movement_of_another_scale_is_refused() -> None:
    net, _ = zoo.build("relu")
    with pytest.raises(ScaleError, match=r"saved at α = 10\.0"):
        Scaled(net, 20.0).load_state_dict(Scaled(net, 10.0).state_dict())


def test_children_may_bear_the_names_of_attributes() -> None:
    class Awkward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.alpha = nn.Parameter(torch.ones(2))
            self.model = nn.Linear(2, 2)
            self.weights = nn.Linear(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.weights(self.model(x) * self.alpha)
            return out

    lazy = Scaled(Awkward(), 5.0)
    assert lazy.alpha == 5.0
    assert {name for name, _ in lazy.named_parameters()} == {
        "alpha", "model.weight", "model.bias", "weights.weight", "weights.bias",
    }  # fmt: skip
    assert lazy(torch.ones(3, 2)).shape == (3, 1)


def test_tied_weights_are_one_parameter() -> None:
    net, x = zoo.build("transformer")
    lazy = Scaled(net, 100.0)
    assert "head.weight" not in dict(lazy.named_parameters())
    assert lazy(x).shape == (4, 40)


def test_to_moves_and_casts_everything() -> None:
    net, x = zoo.build("everything")
    lazy = Scaled(net, 50.0).double()
    with torch.no_grad():
        for parameter in lazy.parameters():
            parameter.normal_(0.0, 0.01)
    assert lazy(x.double()).dtype == torch.float64
    single = lazy.float()(x)
    torch.testing.assert_close(single.double(), lazy.double()(x.double()), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("alpha", [1.0, 1e4, math.inf])
def test_autocast(alpha: float) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 16), nn.GELU(),
                        nn.LayerNorm(16), nn.Linear(16, 4))  # fmt: skip
    x, y = torch.randn(16, 3, 8, 8), torch.randn(16, 4)
    lazy = Scaled(net, alpha)
    train(lazy, x, y, torch.optim.SGD(lazy.parameters(), lr=0.02), steps=5)
    exact = lazy(x).detach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = lazy(x)
        loss = nn.functional.mse_loss(rough.float(), y)
    loss.backward()
    assert float((rough.detach() - exact).norm() / exact.norm()) < 0.05
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in lazy.parameters())


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_modules_give_the_same_values_and_gradients(backend: str) -> None:
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("torch.compile on the CPU needs a C++ compiler")
    # In a separate process, as the run-time type checks of the test suite cannot be compiled.
    script = f"""
        import torch
        from torch import nn
        from lazyscope import Scaled
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 6), nn.Tanh())
        x = torch.randn(3, 2, 8, 8)
        module = Scaled(net, 100.0)
        with torch.no_grad():
            for p in module.parameters():
                p.normal_(0.0, 0.1)
        eager = module(x)
        eager.square().sum().backward()
        expected = [p.grad.clone() for p in module.parameters()]
        module.zero_grad()
        compiled = torch.compile(module, fullgraph=True, backend={backend!r})(x)
        compiled.square().sum().backward()
        torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-5)
        for p, g in zip(module.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, g, rtol=1e-3, atol=1e-4)
        fresh = Scaled(net, 100.0)
        fresh.load_state_dict(module.state_dict())
        within = torch.compile(fresh, backend="eager")(x)  # its program is traced in a compiled forward
        torch.testing.assert_close(within, eager)
        print("same")
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.stdout.strip().endswith("same"), done.stderr[-2000:]


def test_symmetrised_starts_at_zero_with_a_doubled_kernel() -> None:
    net, x = zoo.build("tanh")
    twin = Symmetrised(net)
    assert float(twin(x).detach().abs().max()) == 0.0
    single, double = (Model(each.double()).jacobian(x.double()) for each in (net, twin))
    torch.testing.assert_close(double @ double.T, 2.0 * single @ single.T)
    with pytest.raises(ModelError, match="takes a module"):
        Symmetrised(lambda x: x)


def test_printing_says_the_scale() -> None:
    net, _ = zoo.build("relu")
    assert "alpha=100" in repr(Scaled(net, 100.0))
    assert "8" in repr(Model(nn.Linear(3, 2)))


@pytest.mark.parametrize("make", [lambda net: Scaled(net, 10.0), Linearised])
def test_transforms_of_a_model_are_not_models(make: Callable[[nn.Module], Scaled | Linearised]) -> None:
    net, x = zoo.build("tanh")
    lazy = make(net)
    with pytest.raises(ModelError, match="model_now"):
        tangent_kernel(lazy, x)
    with pytest.raises(ModelError, match="model_now"):
        tangent_kernel(nn.Sequential(lazy, nn.Tanh()), x)
    torch.testing.assert_close(tangent_kernel(lazy.model_now(), x), tangent_kernel(net, x))
