"""A model as a pure function h(w) of its parameters, with its initialisation w₀."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from lazyscope._typing import Inputs, Params
from lazyscope.ambient import derivatives, ordinary
from lazyscope.errors import LazyscopeError, ModelError
from lazyscope.model.coordinates import Alpha, Coordinates, Studied, check_alpha, offset
from lazyscope.model.forward import Output, from_function, from_module, plain_kernels
from lazyscope.model.increment import Captured, Program, Scale, capture, split
from lazyscope.model.increment.decisions import digest
from lazyscope.model.inputs import changed, check_inputs, flatten, signature, unflatten
from lazyscope.model.refusal import check_output, check_weights, explained

__all__ = ["Model", "check_inputs", "flatten", "plain_kernels", "signature", "studied", "unflatten"]


class Model(Studied):
    """h(w) = f(w, ·) with its initialisation w₀.

    From a module (`Model(net)`), w₀ are its trainable parameters now, and the module itself is neither kept nor
    touched; from a function (`Model(f, params)`), f(params, x) is any differentiable program.

    Derivatives are those that autograd gives in reverse mode: `detach()`, `no_grad()` and `.data` in the forward stop
    them. A complex parameter is studied as the pair of its real and imaginary parts.

    Args:
        function: A module, or a function `f(params, x)`.
        params: The initial parameters of a function, tensors by name; a module brings its own.
        output: Which part of the module's output is studied: the name of a field ("logits"), a place in a tuple, or
            a function of the output; all of it by default.

    >>> model = Model(torch.nn.Linear(3, 2))
    >>> model(torch.ones(5, 3)).shape, model.n_params
    (torch.Size([5, 2]), 8)
    """

    def __init__(
        self,
        function: nn.Module | Callable[[Params, Inputs], Tensor],
        params: Mapping[str, Any] | None = None,
        *,
        output: Output = None,
    ) -> None:
        if isinstance(function, nn.Module):
            if params is not None:
                raise ModelError(
                    "A module brings its own parameters; pass Model(net), or a function with Model(f, params)."
                )
            with torch.inference_mode(False):
                self._forward, self.params, self.state = from_module(function, output)
        elif params is None:
            raise ModelError("A function needs its initial parameters; pass Model(f, params) with a dict of tensors.")
        else:
            with torch.inference_mode(False):
                self._forward, self.params, self.state = from_function(function, params, output)
        if not self.params:
            raise ModelError("The model has no trainable parameters; set requires_grad=True on those to study.")
        check_weights(self.params)
        self._graphs: dict[Any, list[Captured]] = {}
        self.coupled: dict[Any, str] = {}  # what is known of samples that depend on each other, by kind of input

    def __getstate__(self) -> dict[str, Any]:
        """Traced programs are not copied or stored; they are made again where they are needed."""
        return {**self.__dict__, "_graphs": {}}

    @property
    def n_params(self) -> int:
        """p, the dimension of the parameter space."""
        return sum(w.numel() for w in self.params.values())

    def as_studied(self, name: str, w: Tensor) -> Tensor:
        """A parameter of the module in the form that is studied: complex numbers as pairs of reals."""
        return torch.view_as_real(w.resolve_conj()) if name in self._forward.complex_names else w

    def as_given(self, name: str, w: Tensor) -> Tensor:
        """The inverse of `as_studied`."""
        return torch.view_as_complex(w.contiguous()) if name in self._forward.complex_names else w

    def __call__(self, x: Inputs, params: Params | None = None) -> Tensor:
        """h(w) on the inputs x, at w₀ unless other parameters are given."""
        return self._evaluate(self.params if params is None else params, self.state, x)

    def _evaluate(self, params: Params, state: Params, x: Inputs) -> Tensor:
        try:
            try:
                out = self._forward(params, state, x)
            except RuntimeError:
                if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
                    raise
                # A derivative inside the forward needs a graph, whatever the caller needs.
                with torch.enable_grad():
                    out = detached(self._forward(params, state, changed(x, Tensor.detach)))
        except LazyscopeError:
            raise
        except Exception as error:  # the user's own forward may raise anything
            raise explained(self._forward, error, params, state, x) from error
        return check_output(out)

    def __repr__(self) -> str:
        return f"Model({len(self.params)} tensors, {self.n_params} parameters)"

    def to(self, *args: Any, **kwargs: Any) -> Model:
        """The same model on another device or in another dtype, as `torch.Tensor.to` for floating tensors."""
        moved = copy.copy(self)
        moved.params = {k: cast(w, *args, **kwargs) for k, w in self.params.items()}
        moved.state = {k: cast(b, *args, **kwargs) for k, b in self.state.items()}
        return moved

    def at(self, params: Params) -> Model:
        """The same function with another initialisation."""
        moved = copy.copy(self)
        moved.params = {name: params[name].detach() for name in self.params}
        return moved

    def double(self) -> Model:
        """The same model in float64: the reference against which everything is tested."""
        return self.to(dtype=torch.float64)

    def graph(self, params: Params, state: Params, x: Inputs, at: Params | None = None) -> Captured:
        """The traced forward for these inputs.

        It is traced once for each shape, dtype and device of the inputs, and again where the forward reads other values
        of the inputs or chooses otherwise.

        Args:
            params: w₀.
            state: Parameters that do not move, and buffers.
            x: The inputs.
            at: The weights whose choices count (which experts are used); w₀ by default.
        """
        names, leaves = flatten(x)
        first = next(iter(params.values()))
        key = (names, signature(first), *(signature(t) for t in leaves))
        found = self._graphs.get(key)
        if found is not None and found[0].unconditional:
            return found[0]
        return self._select(params if at is None else at, state, x, key)

    def program(self, captured: Captured) -> Program:
        """The base and increment programs of a traced forward."""
        found: Program | None = captured.memo.get("program")
        if found is None:
            found = captured.memo["program"] = split(captured, len(self.params))
        return found

    def kinked(self, x: Inputs) -> bool:
        """Whether some operation of the forward (ReLU, max-pooling, sorting) is not everywhere differentiable."""
        return self.program(self.graph(self.params, self.state, x)).kinked

    def base(self, params: Params, state: Params, x: Inputs) -> tuple[Captured, tuple[Any, ...]]:
        """The traced forward for these inputs, and what its increments need of the values at w₀ = params."""
        captured = self.graph(params, state, x)
        return captured, self._values(captured, params, state, x)

    def _values(self, captured: Captured, params: Params, state: Params, x: Inputs) -> tuple[Any, ...]:
        leaves = flatten(x)[1]
        program = self.program(captured)
        fast = prefers_speed(leaves[0].device.type) and not captured.chosen
        run = program.base if fast else program.exact_base
        with torch.no_grad():
            values: tuple[Any, ...] = run(*params.values(), *state.values(), *leaves)
        return values

    def increment(self, params: Params, state: Params, x: Inputs, scale: Scale, v: Params) -> tuple[Tensor, Tensor]:
        """h(w₀) and α(h(w₀ + v/α) - h(w₀)) for w₀ = params."""
        captured, values = self.base(params, state, x)
        moves = [v[name] for name in params]
        lazy = not isinstance(scale.alpha, Tensor) and math.isinf(scale.alpha)
        if lazy:
            captured.check_limit()
        if not captured.chosen:
            return values[-1], self.program(captured).increment(scale, moves, values)
        initial = values[-1].to(moves[0].dtype)
        with torch.no_grad():
            now = {name: w + scale.epsilon * v[name].detach() for name, w in params.items()}
        other = captured if lazy else self.graph(params, state, x, now)
        if other is captured:
            return initial, self.program(captured).increment(scale, moves, values)
        # The choices at the present weights differ: increments are taken with them, and the jump at w₀ is added.
        held = self._values(other, params, state, x)
        if held[-1].shape != values[-1].shape:
            raise ModelError(
                "The shape of the model's output depends on its parameters, so it has no increment; return an output"
                " of fixed shape (scatter the results back into place)."
            )
        jump = scale.times(held[-1] - values[-1]).to(initial.dtype)
        return initial, self.program(other).increment(scale, moves, held) + jump

    # `torch.compiler.disable` would import the compiler now, which takes longer than the rest of lazyscope.
    @_disable_dynamo
    def _select(self, params: Params, state: Params, x: Inputs, key: Any) -> Captured:
        """A graph that is valid for these inputs and these weights, traced if there is none yet."""
        known = self._graphs.get(key, [])
        leaves = [t.detach() for t in (*params.values(), *state.values(), *flatten(x)[1])]
        made: bytes | None = None
        for captured in known:
            if captured.guard is not None and not captured.guard.holds(leaves):
                continue
            if captured.chosen:
                made = self._choices(params, state, x) if made is None else made
                if captured.choices != made:
                    continue
            return captured
        with torch.no_grad():
            self._evaluate(params, state, x)  # bad inputs fail here, with a remedy
        check_inputs(x)
        captured = capture(self.function(flatten(x)[0]), leaves, len(params), len(params) + len(state))
        if captured.chosen:
            captured = replace(captured, choices=made or self._choices(params, state, x))
        self._graphs[key] = [captured, *known[: _KEPT - 1]]
        return captured

    def _choices(self, params: Params, state: Params, x: Inputs) -> bytes:
        return digest(lambda: self._evaluate(params, state, x))

    def function(self, keys: Any) -> Callable[..., Any]:
        """The forward as a function of all its tensors in order: parameters, state, inputs of the structure `keys`."""
        names, fixed = list(self.params), list(self.state)

        def function(*flat: Tensor) -> Any:
            w, rest = dict(zip(names, flat, strict=False)), flat[len(names) :]
            s, inputs = dict(zip(fixed, rest, strict=False)), rest[len(fixed) :]
            return self._forward(w, s, unflatten(keys, inputs))

        return function

    def coordinates(self, x: Inputs, alpha: Alpha = 1.0, *, centred: bool = False) -> Coordinates:
        """v ↦ α(h(w₀ + v/α) - h(w₀)) on the inputs x, plus αh(w₀) unless centred."""
        return ModelCoordinates(self, x, float(check_alpha(alpha)), centred)

    def jacobian(self, x: Inputs) -> Tensor:
        """Dh(w₀) as a dense matrix, (outputs of all points, flattened) × p: the reference for small models."""
        out, leaves = self._with_graph(x)
        rows = torch.eye(out.numel(), dtype=out.dtype, device=out.device).view(-1, *out.shape)
        try:
            blocks = _rows(out, leaves, rows, batched=True)
        except RuntimeError:  # an operation without a batched backward pass
            blocks = torch.cat([_rows(out, leaves, row, batched=False)[None] for row in rows])
        return blocks

    def _with_graph(self, x: Inputs) -> tuple[Tensor, dict[str, Tensor]]:
        with derivatives():
            leaves = {name: w.detach().requires_grad_() for name, w in self.params.items()}
            out = self._evaluate(leaves, self.state, changed(x, ordinary))
        if not out.requires_grad:
            raise ModelError("The model's output does not depend on its trainable parameters; check its forward.")
        return out, leaves


_KEPT = 8
"""Programs that are kept for one shape of inputs, when a forward reads values or chooses."""


def _rows(out: Tensor, leaves: dict[str, Tensor], u: Tensor, *, batched: bool) -> Tensor:
    found = torch.autograd.grad(
        out, list(leaves.values()), u, retain_graph=True, is_grads_batched=batched, materialize_grads=True
    )
    lead = u.shape[:1] if batched else ()
    return torch.cat([(g if g.layout == torch.strided else g.to_dense()).reshape(*lead, -1) for g in found], -1)


class ModelCoordinates(Coordinates):
    """One model on given data: the values at w₀ are computed once, here."""

    def __init__(self, model: Model, x: Inputs, alpha: float, centred: bool) -> None:
        self.batch = ()
        self.alpha = torch.tensor(alpha, dtype=torch.float64, device="cpu")
        self._model, self._x = model, x
        self._captured, self._values = model.base(model.params, model.state, x)
        if math.isinf(alpha):
            self._captured.check_limit()
        self._program = model.program(self._captured)
        self._scale = Scale.of(alpha)
        self._offset = offset(self._values[-1], self.alpha, centred)

    def zeros(self) -> dict[str, Tensor]:
        """v = 0."""
        return {name: torch.zeros_like(w) for name, w in self._model.params.items()}

    def outputs(self, v: Params) -> Tensor:
        """y_α(v)."""
        if self._captured.chosen:
            delta = self._model.increment(self._model.params, self._model.state, self._x, self._scale, v)[1]
        else:
            delta = self._program.increment(self._scale, [v[name] for name in self._model.params], self._values)
        return delta if self._offset is None else delta + self._offset

    def kernel(self) -> Tensor:
        """Dh(w₀)Dh(w₀)ᵀ, dense."""
        jacobian = self._model.jacobian(self._x)
        return jacobian @ jacobian.T


def detached(out: Any) -> Any:
    """An output without its graph."""
    return out.detach() if isinstance(out, Tensor) else out


def prefers_speed(device: str) -> bool:
    """Whether torch's own settings trade precision for speed here (autocast, TF32): then w₀'s values follow suit."""
    return torch.is_autocast_enabled(device) or (device == "cuda" and torch.backends.cudnn.allow_tf32)


def cast(t: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`t.to(…)`; integers keep their dtype."""
    if t.is_floating_point():
        return t.to(*args, **kwargs)
    device = torch._C._nn._parse_to(*args, **kwargs)[0]
    return t if device is None else t.to(device)


def studied(model: Studied | nn.Module) -> Studied:
    """A plain module as the `Model` that it is now; whatever has tangent coordinates as it is."""
    return Model(model) if isinstance(model, nn.Module) else model
