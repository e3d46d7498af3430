"""Modules in tangent coordinates: their parameters are the displacement v, and any torch optimiser trains them.

`Scaled` computes y_α(v) = α(h(w₀ + v/α) - h(w₀)), `Linearised` computes the tangent model h(w₀) + Dh(w₀)v, and
`Symmetrised` is a network whose output is zero at the initialisation. Each is an ordinary `nn.Module` and works with
state dicts, `.to`, autocast, `torch.compile` and optimisers.

Longer than 350 lines because all arguments are documented.
"""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lazyscope._typing import Inputs, Params
from lazyscope.errors import ModelError, ScaleError
from lazyscope.model.base import Model
from lazyscope.model.coordinates import check_alpha
from lazyscope.model.increment import Blocks, Scale
from lazyscope.model.inputs import as_inputs


class _Tree(nn.Module):
    """A container for tensors under dotted names, so that state dicts have the names of the original module."""

    def extra_repr(self) -> str:
        """Return the shapes of the tensors in this container."""
        named = [*self._parameters.items(), *self._buffers.items()]
        return ", ".join(f"{name}={tuple(tensor.shape)}" for name, tensor in named if tensor is not None)


def _plant(root: nn.Module, name: str, tensor: Tensor, *, trainable: bool) -> None:
    *path, leaf = name.split(".")
    for part in path:
        # Written directly into the dictionaries, as a child may have the name of an attribute of the root ("alpha").
        root = root._modules.setdefault(part, _Tree())  # type: ignore[assignment]
    if trainable:
        root._parameters[leaf] = nn.Parameter(torch.zeros_like(tensor))
    else:
        root._buffers[leaf] = tensor.clone()


_Places = tuple[list[tuple[str, dict[str, Any], str]], ...]


def _place(root: nn.Module, name: str, kind: str) -> tuple[dict[str, Any], str]:
    """Find the dictionary of the module that holds a tensor, and its key there."""
    *path, leaf = name.split(".")
    for part in path:
        root = root._modules[part]  # type: ignore[assignment]
    return getattr(root, kind), leaf


class TangentModule(nn.Module):
    """The base class of `Scaled` and `Linearised`: a module around a model whose parameters are v."""

    def __init__(self, model: Model | nn.Module, scale: Scale, checkpointed: bool = False) -> None:
        super().__init__()
        self._blocks = Blocks(checkpointed)
        self._found: _Places | None = None
        studied = Model.of(model)
        self._studied: Model = studied
        self._scale = scale
        self._names = tuple(studied.params)
        self._state_names = tuple(studied.state)
        self._modules["_start"] = _Tree()  # w₀ and the model's buffers are part of this module and of its state dict
        for name, w in studied.params.items():
            _plant(self, name, studied.as_given(name, w), trainable=True)
            _plant(self._modules["_start"], name, studied.as_given(name, w), trainable=False)  # type: ignore[arg-type]
        for name, b in studied.state.items():
            _plant(self._modules["_start"], name, b, trainable=False)  # type: ignore[arg-type]

    def _increment(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Compute h(w₀) and the increment on the inputs."""
        return self._studied.increment(*self._problem(args, kwargs), self._blocks)

    def _increment_alone(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Compute the increment on the inputs."""
        return self._studied.increment_alone(*self._problem(args, kwargs), self._blocks)

    def _problem(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Params, Params, Inputs, Scale, Params]:
        """Collect the arguments of `Model.increment`: w₀, the state, the inputs, the scale and v."""
        model, (moves, start, fixed) = self._studied, self._places
        v = {name: model.as_studied(name, tensors[leaf]) for name, tensors, leaf in moves}
        w0 = {name: model.as_studied(name, tensors[leaf]) for name, tensors, leaf in start}
        state = {name: tensors[leaf] for name, tensors, leaf in fixed}
        return w0, state, as_inputs(args, kwargs), self._scale, v

    @property
    def _places(self) -> _Places:
        """The places of v, w₀ and the state: each name, the dictionary that holds the tensor, and the key in it.

        They are found once, because walking through all modules takes milliseconds, as long as many GPU kernels.
        """
        if self._found is None:
            start: Any = self._modules["_start"]
            self._found = (
                [(name, *_place(self, name, "_parameters")) for name in self._names],
                [(name, *_place(start, name, "_buffers")) for name in self._names],
                [(name, *_place(start, name, "_buffers")) for name in self._state_names],
            )
        return self._found

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_found": None}  # a copy has modules of its own

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the module in place, as `nn.Module.compile` does, but its repeated blocks only once.

        The blocks of a transformer are compiled together when the module is first called, which is ready several times
        sooner than `torch.compile(module)`, and the rest of the module is not compiled. A model without repeated
        blocks is compiled as a whole. It has no effect on a model whose forward makes choices or, on a CPU, has kinks;
        use `torch.compile(module)` there.

        Args:
            *args: Not used; `nn.Module.compile` has it.
            **kwargs: Options of `torch.compile`. In bfloat16 on a GPU, where short kernels wait for Python,
                `mode="reduce-overhead"` is faster.
        """
        self._blocks = replace(self._blocks, compiled=dict(kwargs))

    @abstractmethod
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the output.

        Args:
            *args: The positional arguments of the model. A single tuple or dictionary is unpacked.
            **kwargs: The keyword arguments of the model.
        """

    @property
    @abstractmethod
    def alpha(self) -> float:
        """The scale α, which is infinite for the tangent model."""

    def model_now(self) -> Model:
        """Return the model at w₀, with the initialisation and the buffers that this module holds now.

        These differ from those of the model that was passed in after `.to` or `load_state_dict`.

        Returns:
            A new model. Its tensors are shared with this module.
        """
        start = dict(self._modules["_start"].named_buffers())  # type: ignore[union-attr]
        model = copy.copy(self._studied)
        model.params = {name: self._studied.as_studied(name, start[name]) for name in self._names}
        model.state = {name: start[name] for name in self._state_names}
        return model

    def displacement(self) -> Tensor:
        """Compute ‖v‖, the Euclidean distance from the initialisation in tangent coordinates.

        Returns:
            A tensor without dimensions. The distance of the weights themselves, ‖w - w₀‖, is ‖v‖/α for `Scaled`.
        """
        return torch.stack([p.detach().abs().square().sum() for p in self.parameters()]).sum().sqrt()


class Scaled(TangentModule):
    """Train a model at the scale α: a module with the output y_α(v) = α(h(w₀ + v/α) - h(w₀)).

    The parameters of this module are the displacement v = α(w - w₀), which starts at zero, and not the weights w. They
    have the names and shapes of the model's trainable parameters. α = 1 is ordinary training of the model minus its
    initial output. As α grows, training becomes lazy, and `alpha=math.inf` is the tangent model Dh(w₀)v.

    With `centred=False` the output is αh(w₀ + v/α). Gradient descent on R(y_α(v)) in v, for a loss R, is then gradient
    descent on the scaled objective

        F_α(w) = R(αh(w))/α²    (equation (2))

    in w with the same learning rate. With `centred=True` the same holds for the model h - h(w₀). One learning rate
    therefore serves every α, including infinity.

    The increment is built up operation by operation and never as a difference of two nearly equal outputs, which would
    lose all digits for large α. In float32 it agrees with the formula in float64 up to a relative error of 2e-5 for
    values and 2e-4 for gradients. These are the tolerances of the tests, for α from 0.1 to 1e8 and for infinity. An
    operation without an increment rule is computed as a float64 difference of that operation alone, with a
    `FallbackWarning`.

    The module can be used like any other: with optimisers, `.to`, autocast, `torch.compile` and state dicts. Its state
    dict holds v, w₀, the buffers of the model and α.

    Args:
        model: The module or `Model` to train. A module is copied, and its trainable parameters become w₀. Call
            `net.eval()` first if it contains dropout or batch normalisation.
        alpha: The scale α > 0. `math.inf` gives the tangent model.
        centred: Whether to subtract the initial output, so that y_α(0) = 0. With False, αh(w₀) is added. It must be
            True for an infinite α.
        checkpointed: Whether the repeated blocks of the model, such as those of a transformer, are computed again in
            the backward pass instead of being kept, as `torch.utils.checkpoint` does. It has no effect on a model
            without repeated blocks, or where kinks are computed in float64.

    Raises:
        ScaleError: If α is not positive, or if α is infinite and `centred` is False.
        ModelError: If the model cannot be studied, for the reasons given in `Model`.

    Shape:
        - Inputs: those of the model.
        - Output: the shape of the model's output.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        >>> x, y = torch.randn(16, 2), torch.randn(16, 1)
        >>> lazy = Scaled(net, alpha=1e6)
        >>> optimiser = torch.optim.SGD(lazy.parameters(), lr=0.1)
        >>> for _ in range(10):
        ...     optimiser.zero_grad()
        ...     loss = nn.functional.mse_loss(lazy(x), y)
        ...     loss.backward()
        ...     optimiser.step()
        >>> lazy(x).shape
        torch.Size([16, 1])

        At this scale the weights have barely moved, although the output has. They can be loaded into the network:

        >>> trained = lazy.weights()
        >>> all(torch.allclose(trained[name], w, atol=1e-4) for name, w in net.named_parameters())
        True
        >>> net.load_state_dict(trained)
        <All keys matched successfully>
    """

    def __init__(
        self, model: Model | nn.Module, alpha: float, *, centred: bool = True, checkpointed: bool = False
    ) -> None:
        value = float(check_alpha(alpha))
        if math.isinf(value) and not centred:
            raise ScaleError("At α = ∞ the output αh(w₀) is infinite; pass centred=True, or use Linearised.")
        super().__init__(model, Scale.of(value), checkpointed)
        self._centred = centred

    @property
    def alpha(self) -> float:
        """The scale α."""
        return float(self._scale.alpha)

    @property
    def centred(self) -> bool:
        """Whether the initial output is subtracted."""
        return self._centred

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute α(h(w₀ + v/α) - h(w₀)), plus αh(w₀) if the module is not centred.

        Args:
            *args: The positional arguments of the model. A single tuple or dictionary is unpacked.
            **kwargs: The keyword arguments of the model.

        Returns:
            The output y_α(v), of the shape of the model's output.
        """
        if self._centred:
            return self._increment_alone(args, kwargs)
        initial, delta = self._increment(args, kwargs)
        return torch.add(delta, initial, alpha=self.alpha)

    def weights(self) -> dict[str, Tensor]:
        """Compute the weights w = w₀ + v/α.

        Returns:
            The detached weights by name. `net.load_state_dict(scaled.weights(), strict=False)` loads them into the
            original module.
        """
        start = dict(self._modules["_start"].named_buffers())  # type: ignore[union-attr]
        v = dict(self.named_parameters())
        return {name: start[name] + v[name].detach() * self._scale.epsilon for name in self._names}

    def get_extra_state(self) -> Tensor:
        """Return α for the state dict, since v depends on it.

        Returns:
            A float64 tensor without dimensions.
        """
        return torch.tensor(self.alpha, dtype=torch.float64, device="cpu")

    def set_extra_state(self, state: Any) -> None:
        """Check that a state dict was saved at the same α.

        Args:
            state: The α of the state dict.

        Raises:
            ScaleError: If it is not the α of this module.
        """
        if float(state) != self.alpha:
            raise ScaleError(
                f"This state was saved at α = {float(state)}, not {self.alpha}; build Scaled with that α first."
            )

    def extra_repr(self) -> str:
        """Return the settings that `print` shows."""
        return f"alpha={self.alpha:g}, centred={self._centred}"


class Linearised(TangentModule):
    """The tangent model h(w₀) + Dh(w₀)v of a model, equation (3), as a module whose parameters are v.

    This is the linearisation of the model around its initialisation: it is affine in v, and its tangent kernel
    Dh(w₀)Dh(w₀)ᵀ does not change during training. The parameters start at v = 0 and have the names and shapes of the
    model's trainable parameters. The output is computed by one forward-mode derivative, and the Jacobian is never
    formed.

    Args:
        model: The module or `Model` to linearise. A module is copied, and its trainable parameters become w₀. Call
            `net.eval()` first if it contains dropout or batch normalisation.
        centred: Whether to leave out h(w₀). With True, the module computes the same output as
            `Scaled(model, alpha=math.inf)`.
        checkpointed: Whether the repeated blocks of the model, such as those of a transformer, are computed again in
            the backward pass instead of being kept, as `torch.utils.checkpoint` does. It has no effect on a model
            without repeated blocks, or where kinks are computed in float64.

    Raises:
        ModelError: If the model cannot be studied, for the reasons given in `Model`.

    Shape:
        - Inputs: those of the model.
        - Output: the shape of the model's output.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        >>> x = torch.ones(3, 2)
        >>> tangent = Linearised(net)
        >>> torch.allclose(tangent(x), net(x))  # v = 0
        True
        >>> with torch.no_grad():
        ...     for v in tangent.parameters():
        ...         _ = v.fill_(0.5)
        >>> jacobian = Model(net).jacobian(x)
        >>> v = torch.full((jacobian.shape[1],), 0.5)
        >>> torch.allclose(tangent(x), net(x) + (jacobian @ v)[:, None], atol=1e-5)
        True
    """

    def __init__(self, model: Model | nn.Module, *, centred: bool = False, checkpointed: bool = False) -> None:
        super().__init__(model, Scale.of(math.inf), checkpointed)
        self._centred = centred

    @property
    def alpha(self) -> float:
        """The scale α, which is infinite."""
        return math.inf

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute h(w₀) + Dh(w₀)v, or Dh(w₀)v if the module is centred.

        Args:
            *args: The positional arguments of the model. A single tuple or dictionary is unpacked.
            **kwargs: The keyword arguments of the model.

        Returns:
            The output of the tangent model, of the shape of the model's output.
        """
        if self._centred:
            return self._increment_alone(args, kwargs)
        initial, delta = self._increment(args, kwargs)
        return initial + delta

    def weights(self) -> dict[str, Tensor]:
        """Compute w₀ + v, the weights w̄ at which the linearised model is evaluated.

        Returns:
            The detached weights by name.
        """
        start = dict(self._modules["_start"].named_buffers())  # type: ignore[union-attr]
        v = dict(self.named_parameters())
        return {name: start[name] + v[name].detach() for name in self._names}

    def extra_repr(self) -> str:
        """Return the settings that `print` shows."""
        return f"centred={self._centred}"


class Symmetrised(nn.Module):
    """A network whose output is zero at the initialisation: h(w_a) - h(w_b) with w_a(0) = w_b(0) (Section 3.1).

    The module holds two copies of a network, which start from the same weights and are trained together. The initial
    output is zero, so that αh(w₀) is zero for every α and nothing needs to be centred. The tangent kernel at the
    initialisation is twice that of the network.

    Args:
        net: The module to copy. It is not changed.

    Attributes:
        a: The copy whose output is added.
        b: The copy whose output is subtracted.

    Raises:
        ModelError: If `net` is not a module.

    Shape:
        - Inputs: those of the network.
        - Output: the shape of the network's output.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> twin = Symmetrised(net)
        >>> twin(torch.ones(3, 2)).abs().max().item()
        0.0
        >>> sum(p.numel() for p in twin.parameters()) == 2 * sum(p.numel() for p in net.parameters())
        True
        >>> lazy = Scaled(twin, alpha=100.0, centred=False)  # the same as centred=True, since h(w₀) = 0
        >>> lazy(torch.ones(3, 2)).abs().max().item()
        0.0
    """

    def __init__(self, net: Any) -> None:
        super().__init__()
        if not isinstance(net, nn.Module):
            raise ModelError("Symmetrised takes a module; for a function, write f(a, x) - f(b, x) instead.")
        self.a = copy.deepcopy(net)
        self.b = copy.deepcopy(net)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute h(w_a) - h(w_b).

        Args:
            *args: The positional arguments of the network.
            **kwargs: The keyword arguments of the network.

        Returns:
            The difference of the two outputs.
        """
        difference: Tensor = self.a(*args, **kwargs) - self.b(*args, **kwargs)
        return difference
