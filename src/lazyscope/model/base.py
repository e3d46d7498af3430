"""A model as a pure function h(w) of its parameters, together with its initialisation w₀.

Longer than 350 lines because all arguments are documented.
"""

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
from lazyscope.errors import InputError, LazyscopeError, ModelError, ScaleError
from lazyscope.model.coordinates import Alpha, Coordinates, Studied, check_alpha, offset
from lazyscope.model.forward import FunctionForward, Output, from_function, from_module, plain_kernels
from lazyscope.model.increment import Blocks, Captured, FallbackWarning, Program, Scale, capture, split
from lazyscope.model.increment.decisions import digest
from lazyscope.model.inputs import Samples, check_inputs, flatten, signature, unflatten
from lazyscope.model.refusal import check_output, check_weights, explained
from lazyscope.notices import notify

__all__ = ["Model", "check_inputs", "flatten", "plain_kernels", "signature", "studied", "unflatten"]


_AS_THEY_ARE = Blocks()
"""Repeated blocks that are neither recomputed nor compiled."""


class Model(Studied):
    """A model h(w) = f(w, ·) as a pure function of its parameters w, together with its initialisation w₀.

    A model is built from a module, `Model(net)`, or from a function of a dictionary of tensors, `Model(f, params)`.
    A module is copied when the model is built: w₀ holds the values that its trainable parameters have at that time,
    and nothing that is done with the model changes the module. Parameters with `requires_grad=False` and buffers
    are part of the model's state and stay fixed. The functions of lazyscope also accept a module in place of a `Model`
    and build the model themselves.

    The output must be a deterministic function of the parameters and the inputs. Call `net.eval()` first if the
    module contains dropout or batch normalisation. The forward is traced the first time it is needed for inputs of
    some shape, and the trace is kept: values that the forward takes from elsewhere (global variables, attributes,
    environment variables) are those of that time. Build a new `Model` after changing one of them.

    Derivatives are computed by autograd in reverse mode, so `detach()`, `torch.no_grad()` and `.data` in the forward
    stop them, as they do in ordinary training. A complex parameter is represented by a real tensor with one more
    dimension, of size 2, for its real and imaginary parts.

    Args:
        function: A module, or a differentiable function `f(params, x)` that returns one floating-point tensor.
        params: The initial parameters of a function, as a dictionary of floating-point tensors. Leave it out for a
            module.
        output: The part of the output to study: the name of a field (`"logits"`), an index into a tuple, or a
            function that maps the output to a tensor. The default, `None`, studies the whole output, which must then
            be one tensor.

    Attributes:
        params: The initialisation w₀: the trainable parameters by name.
        state: The fixed parameters and the buffers by name.
        coupled: For each kind of input, whether the outputs depend on other samples of the batch. It is filled in
            when it is first needed.

    Raises:
        ModelError: If the model has no trainable parameters, if a parameter is not finite, or if the module contains
            dropout or batch normalisation in training mode.

    Shape:
        - Inputs: a tensor of shape `(n, ...)`, a tuple of tensors (positional arguments) or a dictionary of tensors
          (keyword arguments).
        - Output: `(n, ...)`.

    Example:
        >>> model = Model(nn.Linear(3, 2))
        >>> model
        Model(2 tensors, 8 parameters)
        >>> x = torch.ones(5, 3)
        >>> model(x).shape
        torch.Size([5, 2])
        >>> model.jacobian(x).shape  # 5 points with 2 outputs each, 8 parameters
        torch.Size([10, 8])

        A model can also be a function of its parameters, or a part of what a module returns:

        >>> model = Model(lambda w, x: torch.tanh(x @ w["a"]) @ w["b"], {"a": torch.ones(3, 4), "b": torch.ones(4)})
        >>> model(x).shape
        torch.Size([5])
        >>> recurrent = Model(nn.GRU(3, 4, batch_first=True), output=0)
        >>> recurrent(torch.ones(5, 7, 3)).shape
        torch.Size([5, 7, 4])
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
            lazy = next((type(part).__name__ for part in function.modules() if hasattr(part, "model_now")), None)
            if lazy is not None:
                raise ModelError(
                    f"{lazy} is made from a model, and its parameters are displacements; pass `net.model_now()` for the"
                    " model at its start, or `net.model_now().at(net.weights())` at its present weights."
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
        self._warned: set[str] = set()  # of operations without a rule, once per model
        self.coupled: dict[Any, str] = {}  # how samples depend on each other, for each kind of input

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the traced programs, which are not copied or pickled but traced again when they are needed."""
        return {**self.__dict__, "_graphs": {}}

    @property
    def n_params(self) -> int:
        """The number p of parameters, which is the dimension of the parameter space."""
        return sum(w.numel() for w in self.params.values())

    def submodules(self) -> list[tuple[str, nn.Module]]:
        """Return the submodules that evaluate the model in this thread, for hooks.

        Returns:
            The names and the submodules, as in `nn.Module.named_modules`. A model that is a function has none.
        """
        return [] if isinstance(self._forward, FunctionForward) else list(self._forward.own.named_modules())

    def as_studied(self, name: str, w: Tensor) -> Tensor:
        """Convert a parameter of the module to the form in which `params` holds it.

        Args:
            name: The name of the parameter.
            w: The parameter as the module holds it, real or complex.

        Returns:
            The tensor itself if it is real. If it is complex, a real view with a last dimension of size 2 for the real
            and imaginary parts.
        """
        return torch.view_as_real(w.resolve_conj()) if name in self._forward.complex_names else w

    def as_given(self, name: str, w: Tensor) -> Tensor:
        """Convert a parameter from the form in which `params` holds it to that of the module.

        This is the inverse of `as_studied`.

        Args:
            name: The name of the parameter.
            w: The parameter as `params` holds it.

        Returns:
            The parameter as the module holds it, real or complex.
        """
        return torch.view_as_complex(w.contiguous()) if name in self._forward.complex_names else w

    def __call__(self, x: Inputs, params: Params | None = None) -> Tensor:
        """Evaluate h(w) on the inputs x.

        Args:
            x: The inputs: a tensor, a tuple of tensors (positional arguments) or a dictionary of tensors (keyword
                arguments).
            params: The parameters w by name. The default, `None`, evaluates the model at its initialisation w₀.

        Returns:
            The selected output, one floating-point tensor, usually of shape `(n, ...)`.

        Raises:
            InputError: If the forward fails on the inputs.
            ModelError: If the model does not return one floating-point tensor.
        """
        return self._evaluate(self.params if params is None else params, self.state, x)

    def _evaluate(self, params: Params, state: Params, x: Inputs) -> Tensor:
        try:
            try:
                out = self._forward(params, state, x)
            except RuntimeError:
                if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
                    raise
                # A forward that computes a derivative itself needs a graph, even under the caller's `no_grad`.
                with torch.enable_grad():
                    out = detached(self._forward(params, state, Samples(x).map(Tensor.detach)))
        except LazyscopeError:
            raise
        except Exception as error:  # the user's own forward may raise anything
            raise explained(self._forward, error, params, state, x) from error
        return check_output(out)

    def __repr__(self) -> str:
        return f"Model({len(self.params)} tensors, {self.n_params} parameters)"

    def to(self, *args: Any, **kwargs: Any) -> Model:
        """Move or cast the parameters and the state.

        Args:
            *args: The device, the dtype or another tensor, as for `torch.Tensor.to`. Integer tensors move to the device
                but keep their dtype.
            **kwargs: The keyword arguments of `torch.Tensor.to`.

        Returns:
            A new model. This one is not changed.
        """
        moved = copy.copy(self)
        moved.params = {k: cast(w, *args, **kwargs) for k, w in self.params.items()}
        moved.state = {k: cast(b, *args, **kwargs) for k, b in self.state.items()}
        return moved

    @classmethod
    def of(cls, model: Model | nn.Module) -> Model:
        """Wrap a module in a `Model`, and return a `Model` unchanged.

        Args:
            model: A module or a model.

        Returns:
            The model.
        """
        return model if isinstance(model, Model) else cls(model)

    def moved(self, v: Params, alpha: Alpha = 1.0) -> Model:
        """Return the model at `w₀ + v/α`.

        Args:
            v: The displacement in tangent coordinates, by parameter name.
            alpha: The scale α.

        Returns:
            The same function with these weights as its initialisation.
        """
        scale = check_alpha(alpha)
        return self.at({name: w + v[name] / scale.to(w) for name, w in self.params.items()})

    def at(self, params: Params) -> Model:
        """Build a model with the same function and another initialisation.

        Args:
            params: The new w₀ by name, with an entry for each name in `self.params`.

        Returns:
            A new model. This one is not changed.

        Raises:
            InputError: If there is not one tensor for each parameter.
        """
        _check_params(params, self.params)
        moved = copy.copy(self)
        moved.params = {name: params[name].detach() for name in self.params}
        return moved

    def double(self) -> Model:
        """Cast the model to float64.

        Returns:
            A new model whose floating-point parameters and state are in float64. This one is not changed.
        """
        return self.to(dtype=torch.float64)

    def graph(self, params: Params, state: Params, x: Inputs, at: Params | None = None) -> Captured:
        """Return the traced forward for these inputs.

        The forward is traced once for each combination of shapes, dtypes and devices of the inputs. It is traced again
        if control flow depends on values of the inputs or on the parameters, and these have changed.

        Args:
            params: The initialisation w₀ by name.
            state: The fixed parameters and the buffers by name.
            x: The inputs.
            at: The parameters that decide the control flow, such as which experts are used. The default, `None`, uses
                `params`.

        Returns:
            The traced graph, with the conditions under which it is valid.
        """
        names, leaves = flatten(x)
        first = next(iter(params.values()))
        key = (names, signature(first), *(signature(t) for t in leaves))
        found = self._graphs.get(key)
        if found is not None and found[0].unconditional:
            return found[0]
        return self._select(params if at is None else at, state, x, key)

    def program(self, captured: Captured) -> Program:
        """Return the base program and the increment program of a traced forward.

        Args:
            captured: A traced forward from `graph`.

        Returns:
            The program that computes the values at w₀, and the program that computes increments from them. Both are
            stored with the traced forward, so that they are built once.
        """
        found: Program | None = captured.memo.get("program")
        if found is None:
            found = captured.memo["program"] = split(captured, len(self.params))
            for name in (each for each in found.without_rule if each not in self._warned):
                self._warned.add(name)
                notify(
                    f"{name} has no increment rule; it is computed as a float64 difference of that operation alone.",
                    FallbackWarning,
                    stacklevel=3,
                )
        return found

    def kinked(self, x: Inputs) -> bool:
        """Check whether the forward contains an operation that is not differentiable everywhere.

        Args:
            x: The inputs for which the forward is traced.

        Returns:
            True if the forward contains an operation such as ReLU, max-pooling or sorting.
        """
        return self.program(self.graph(self.params, self.state, x)).kinked

    def base(self, params: Params, state: Params, x: Inputs) -> tuple[Captured, tuple[Any, ...]]:
        """Trace the forward for these inputs and evaluate it at w₀.

        Args:
            params: The initialisation w₀ by name.
            state: The fixed parameters and the buffers by name.
            x: The inputs.

        Returns:
            The traced forward, and the intermediate values at w₀ that the increments need, with h(w₀) as the last one.
        """
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

    def increment(
        self, params: Params, state: Params, x: Inputs, scale: Scale, v: Params, blocks: Blocks = _AS_THEY_ARE
    ) -> tuple[Tensor, Tensor]:
        """Compute h(w₀) and the increment α(h(w₀ + v/α) - h(w₀)).

        The increment is built up operation by operation, without a difference of two nearly equal outputs, and is
        differentiable in v.

        Args:
            params: The initialisation w₀ by name.
            state: The fixed parameters and the buffers by name.
            x: The inputs.
            scale: The scale α, as `Scale.of(alpha)`. An infinite α gives Dh(w₀)v.
            v: The displacement by name, with the shapes of `params`.
            blocks: How repeated blocks, such as those of a transformer, run. By default they are neither recomputed in
                the backward pass nor compiled.

        Returns:
            h(w₀) and the increment, both of the shape of the output.

        Raises:
            ModelError: If the shape of the output depends on the parameters, or if α is infinite and the forward is
                undecided at w₀ (a tie between two choices).
        """
        captured = self.graph(params, state, x)
        moves = [v[name] for name in params]
        lazy = not isinstance(scale.alpha, Tensor) and math.isinf(scale.alpha)
        if lazy:
            captured.check_limit()
        program = self.program(captured)
        if program.joint is not None and self._at_once(captured):
            leaves = [*params.values(), *state.values(), *flatten(x)[1]]
            return program.joint(scale, moves, leaves, blocks)
        values = self._values(captured, params, state, x)
        if not captured.chosen:
            return values[-1], program.increment(scale, moves, values)
        initial = values[-1].to(moves[0].dtype)
        with torch.no_grad():
            now = {name: w + scale.epsilon * v[name].detach() for name, w in params.items()}
        other = captured if lazy else self.graph(params, state, x, now)
        if other is captured:
            return initial, self.program(captured).increment(scale, moves, values)
        # The choices at w₀ + v/α differ from those at w₀. The increment is computed with the present choices, and the
        # jump between the two outputs at w₀ is added.
        held = self._values(other, params, state, x)
        if held[-1].shape != values[-1].shape:
            raise ModelError(
                "The shape of the model's output depends on its parameters, so it has no increment; return an output"
                " of fixed shape (scatter the results back to their positions)."
            )
        jump = scale.times(held[-1] - values[-1]).to(initial.dtype)
        return initial, self.program(other).increment(scale, moves, held) + jump

    def increment_alone(
        self, params: Params, state: Params, x: Inputs, scale: Scale, v: Params, blocks: Blocks = _AS_THEY_ARE
    ) -> Tensor:
        """Compute the increment α(h(w₀ + v/α) - h(w₀)) without h(w₀).

        Args:
            params: The initialisation w₀ by name.
            state: The fixed parameters and the buffers by name.
            x: The inputs.
            scale: The scale α, as `Scale.of(alpha)`.
            v: The displacement by name, with the shapes of `params`.
            blocks: How repeated blocks, such as those of a transformer, run. By default they are neither recomputed in
                the backward pass nor compiled.

        Returns:
            The increment, of the shape of the output.
        """
        captured = self.graph(params, state, x)
        lone = self.program(captured).lone
        if lone is None or not self._at_once(captured):
            return self.increment(params, state, x, scale, v)[1]
        if not isinstance(scale.alpha, Tensor) and math.isinf(scale.alpha):
            captured.check_limit()
        leaves = [*params.values(), *state.values(), *flatten(x)[1]]
        return lone(scale, [v[name] for name in params], leaves, blocks)

    def _at_once(self, captured: Captured) -> bool:
        """Whether values at w₀ and increments are computed together: where none is wanted in float64."""
        program = self.program(captured)
        if captured.chosen or program.joint is None:
            return False
        return not program.kinked or prefers_speed(next(iter(self.params.values())).device.type)

    # `torch.compiler.disable` would import the compiler now, which takes longer than the rest of lazyscope.
    @_disable_dynamo
    def _select(self, params: Params, state: Params, x: Inputs, key: Any) -> Captured:
        """Find a graph that is valid for these inputs and weights, or trace one."""
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
            self._evaluate(params, state, x)  # invalid inputs raise an error that names the remedy
        check_inputs(x)
        captured = capture(self.function(flatten(x)[0]), leaves, len(params), len(params) + len(state))
        if captured.chosen:
            captured = replace(captured, choices=made or self._choices(params, state, x))
        self._graphs[key] = [captured, *known[: _KEPT - 1]]
        return captured

    def _choices(self, params: Params, state: Params, x: Inputs) -> bytes:
        return digest(lambda: self._evaluate(params, state, x))

    def function(self, keys: Any) -> Callable[..., Any]:
        """Return the forward as a function of a flat list of tensors.

        Args:
            keys: The structure of the inputs, from `flatten`.

        Returns:
            A function that takes the parameters, the state and the tensors of the inputs as positional arguments, in
            this order, and returns the selected output.
        """
        names, fixed = list(self.params), list(self.state)

        def function(*flat: Tensor) -> Any:
            w, rest = dict(zip(names, flat, strict=False)), flat[len(names) :]
            s, inputs = dict(zip(fixed, rest, strict=False)), rest[len(fixed) :]
            return self._forward(w, s, unflatten(keys, inputs))

        return function

    def coordinates(self, x: Inputs, alpha: Alpha = 1.0, *, centred: bool = False) -> Coordinates:
        """Return the map v ↦ α(h(w₀ + v/α) - h(w₀)) on fixed inputs, plus αh(w₀) unless `centred`.

        Everything that depends only on w₀ and on the inputs is computed once, in this call.

        Args:
            x: The inputs.
            alpha: The scale α > 0. `math.inf` gives the tangent model Dh(w₀)v.
            centred: Whether to leave out αh(w₀). It must be True if α is infinite and h(w₀) is not zero.

        Returns:
            The tangent coordinates, with methods for the outputs, their derivatives and the tangent kernel.

        Raises:
            ScaleError: If α is not positive, or if αh(w₀) is infinite.
        """
        _check_single(alpha)
        return ModelCoordinates(self, x, float(check_alpha(alpha)), centred)

    def jacobian(self, x: Inputs) -> Tensor:
        """Compute the Jacobian Dh(w₀) as a dense matrix.

        The matrix holds (number of outputs) × (number of parameters) entries, so this method is meant for small models.

        Args:
            x: The inputs.

        Returns:
            A matrix of shape `(N, p)`, where N is the number of outputs of all points. Rows are ordered as
            `model(x).flatten()`, and columns as the parameters in `params`, each flattened.

        Raises:
            ModelError: If the output does not depend on the trainable parameters.
        """
        out, leaves = self._with_graph(x)
        rows = torch.eye(out.numel(), dtype=out.dtype, device=out.device).view(-1, *out.shape)
        try:
            blocks = _rows(out, leaves, rows, batched=True)
        except RuntimeError:  # an operation does not support a batched backward pass
            blocks = torch.cat([_rows(out, leaves, row, batched=False)[None] for row in rows])
        return blocks

    def _with_graph(self, x: Inputs) -> tuple[Tensor, dict[str, Tensor]]:
        with derivatives():
            leaves = {name: w.detach().requires_grad_() for name, w in self.params.items()}
            out = self._evaluate(leaves, self.state, Samples(x).map(ordinary))
        if not out.requires_grad:
            raise ModelError("The model's output does not depend on its trainable parameters; check its forward.")
        return out, leaves


_KEPT = 8
"""The number of programs kept for one shape of inputs, for a forward whose control flow depends on values."""


def _rows(out: Tensor, leaves: dict[str, Tensor], u: Tensor, *, batched: bool) -> Tensor:
    found = torch.autograd.grad(
        out, list(leaves.values()), u, retain_graph=True, is_grads_batched=batched, materialize_grads=True
    )
    lead = u.shape[:1] if batched else ()
    return torch.cat([(g if g.layout == torch.strided else g.to_dense()).reshape(*lead, -1) for g in found], -1)


class ModelCoordinates(Coordinates):
    """The tangent coordinates of one model on given data. The values at w₀ are computed once, in the constructor."""

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
        """Return v = 0, the initialisation."""
        return {name: torch.zeros_like(w) for name, w in self._model.params.items()}

    def outputs(self, v: Params) -> Tensor:
        """Compute y_α(v), differentiably in v."""
        if self._captured.chosen:
            delta = self._model.increment(self._model.params, self._model.state, self._x, self._scale, v)[1]
        else:
            delta = self._program.increment(self._scale, [v[name] for name in self._model.params], self._values)
        return delta if self._offset is None else delta + self._offset

    def kernel(self) -> Tensor:
        """Compute the tangent kernel Dh(w₀)Dh(w₀)ᵀ as a dense matrix."""
        jacobian = self._model.jacobian(self._x)
        return jacobian @ jacobian.T


def detached(out: Any) -> Any:
    """Detach an output if it is a tensor."""
    return out.detach() if isinstance(out, Tensor) else out


def prefers_speed(device: str) -> bool:
    """Check whether torch's settings (autocast, TF32) trade precision for speed; the values at w₀ then do so too."""
    return torch.is_autocast_enabled(device) or (device == "cuda" and torch.backends.cudnn.allow_tf32)


def cast(t: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Apply `t.to(…)`, but keep the dtype of integer tensors."""
    if t.is_floating_point():
        return t.to(*args, **kwargs)
    device = torch._C._nn._parse_to(*args, **kwargs)[0]
    return t if device is None else t.to(device)


def studied(model: Studied | nn.Module) -> Studied:
    """Convert a module to a `Model`.

    Args:
        model: A module, or an object that has tangent coordinates (a `Model`, an `Ensemble`, a `TwoLayer`).

    Returns:
        A `Model` of the module as it is now. Any other object is returned unchanged.
    """
    _check_studied(model)
    return Model(model) if isinstance(model, nn.Module) else model


def _check_studied(model: Any) -> None:
    if isinstance(model, type) or not (isinstance(model, nn.Module) or hasattr(model, "coordinates")):
        kind = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise ModelError(f"The model is {kind}; pass an nn.Module, or lazyscope.Model(f, params) for a function.")


def _check_single(alpha: Alpha) -> None:
    if check_alpha(alpha).ndim:
        raise ScaleError("There are several scales α for one model; pass one number, or an Ensemble of models.")


def _check_params(given: Any, known: Params) -> None:
    if not isinstance(given, Mapping) or not all(isinstance(given.get(name), Tensor) for name in known):
        raise InputError(f"There is not one tensor for each of the parameters {', '.join(known)}; pass them by name.")
