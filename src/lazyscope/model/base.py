"""A model as a pure function h(w) of its parameters, with its initialisation w₀."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn.attention import SDPBackend, sdpa_kernel

from lazyscope._typing import Inputs, Params
from lazyscope.errors import InputError, LazyscopeError, ModelError
from lazyscope.model.coordinates import Alpha, Coordinates, Studied, check_alpha, offset
from lazyscope.model.increment import Program, Scale, trace


@contextlib.contextmanager
def plain_kernels() -> Iterator[None]:
    """Attention and transformer layers in their plain form: the fused kernels have no forward derivative."""
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


Forward = Callable[[Params, Params, Inputs], Any]
"""(parameters, fixed state, inputs) ↦ output."""


class Model(Studied):
    """h(w) = f(w, ·) with its initialisation w₀.

    From a module (`Model(net)`), w₀ are its trainable parameters now, and the module itself is neither kept nor
    touched; from a function (`Model(f, params)`), f(params, x) is any differentiable program.

    >>> model = Model(torch.nn.Linear(3, 2))
    >>> model(torch.ones(5, 3)).shape, model.n_params
    (torch.Size([5, 2]), 8)
    """

    def __init__(
        self, function: nn.Module | Callable[[Params, Inputs], Tensor], params: Mapping[str, Any] | None = None
    ) -> None:
        if isinstance(function, nn.Module):
            if params is not None:
                raise ModelError(
                    "A module brings its own parameters; pass Model(net), or a function with Model(f, params)."
                )
            self._forward, self.params, self.state = _from_module(function)
        elif params is None:
            raise ModelError("A function needs its initial parameters; pass Model(f, params) with a dict of tensors.")
        else:
            self._forward, self.params, self.state = _from_function(function, params)
        if not self.params:
            raise ModelError("The model has no trainable parameters; set requires_grad=True on those to study.")
        self._programs: dict[Any, Program] = {}

    @property
    def n_params(self) -> int:
        """p, the dimension of the parameter space."""
        return sum(w.numel() for w in self.params.values())

    def __call__(self, x: Inputs, params: Params | None = None) -> Tensor:
        """h(w) on the inputs x, at w₀ unless other parameters are given."""
        return self._evaluate(self.params if params is None else params, self.state, x)

    def _evaluate(self, params: Params, state: Params, x: Inputs) -> Tensor:
        try:
            out = self._forward(params, state, x)
        except (RuntimeError, IndexError) as error:
            raise self._explain(error, params, state, x) from error
        return check_output(out)

    def __repr__(self) -> str:
        return f"Model({len(self.params)} tensors, {self.n_params} parameters)"

    def to(self, *args: Any, **kwargs: Any) -> Model:
        """The same model on another device or in another dtype, as `torch.Tensor.to` for floating tensors."""
        moved = copy.copy(self)
        moved.params = {k: cast(w, *args, **kwargs) for k, w in self.params.items()}
        moved.state = {k: cast(b, *args, **kwargs) for k, b in self.state.items()}
        moved._programs = {}
        return moved

    def at(self, params: Params) -> Model:
        """The same function with another initialisation."""
        moved = copy.copy(self)
        moved.params = {name: params[name].detach() for name in self.params}
        return moved

    def double(self) -> Model:
        """The same model in float64: the reference against which everything is tested."""
        return self.to(dtype=torch.float64)

    def program(self, params: Params, state: Params, x: Inputs) -> Program:
        """The base and increment programs for inputs of this shape, traced once for each shape, dtype and device."""
        names, leaves = flatten(x)
        first = next(iter(params.values()))
        key = (names, signature(first), *(signature(t) for t in leaves))
        found = self._programs.get(key)
        return self._trace(params, state, x, key) if found is None else found

    def base(self, params: Params, state: Params, x: Inputs) -> tuple[Program, tuple[Any, ...]]:
        """The program for these inputs, and its values at w₀ = params."""
        program = self.program(params, state, x)
        leaves = flatten(x)[1]
        run = program.base if prefers_speed(leaves[0].device.type) else program.exact_base
        with torch.no_grad():
            return program, run(*params.values(), *state.values(), *leaves)

    # `torch.compiler.disable` would import the compiler now, which takes longer than the rest of lazyscope.
    @_disable_dynamo
    def _trace(self, params: Params, state: Params, x: Inputs, key: Any) -> Program:
        names, fixed = list(params), list(state)
        with torch.no_grad():
            self._evaluate(params, state, x)  # bad inputs fail here, with a remedy
        check_inputs(x)
        keys, leaves = flatten(x)

        def function(*flat: Tensor) -> Any:
            w, rest = dict(zip(names, flat, strict=False)), flat[len(names) :]
            s, inputs = dict(zip(fixed, rest, strict=False)), rest[len(fixed) :]
            return self._forward(w, s, unflatten(keys, inputs))

        flat = [t.detach() for t in (*params.values(), *state.values(), *leaves)]
        self._programs[key] = trace(function, flat, len(names), len(names) + len(fixed))
        return self._programs[key]

    def coordinates(self, x: Inputs, alpha: Alpha = 1.0, *, centred: bool = False) -> Coordinates:
        """v ↦ α(h(w₀ + v/α) - h(w₀)) on the inputs x, plus αh(w₀) unless centred."""
        return ModelCoordinates(self, x, float(check_alpha(alpha)), centred)

    def jacobian(self, x: Inputs) -> Tensor:
        """Dh(w₀) as a dense matrix, (outputs of all points, flattened) × p: the reference for small models."""
        jacobian = torch.func.jacrev(lambda w: self._forward(w, self.state, x).flatten())(dict(self.params))
        return torch.cat([block.reshape(len(block), -1) for block in jacobian.values()], 1)

    def _explain(self, error: Exception, params: Params, state: Params, x: Inputs) -> LazyscopeError:
        """What the user can do about a forward that failed."""
        leaves = flatten(x)[1]
        first = next(iter(params.values()))
        if any(t.device != first.device for t in leaves):
            places = sorted({str(t.device) for t in leaves})
            return InputError(
                f"The model is on {first.device} and the inputs on {', '.join(places)}; move one to the other."
            )
        reason = str(error).splitlines()[0]
        if any(not t.is_floating_point() for t in leaves) and self._accepts(
            params, state, x, lambda t: t.to(first.dtype)
        ):
            return InputError(f"The model computes on floats but the inputs are integers; pass x.to({first.dtype}).")
        if any(t.is_floating_point() and t.dtype != first.dtype for t in leaves) and self._accepts(
            params, state, x, lambda t: t.to(first.dtype) if t.is_floating_point() else t
        ):
            return InputError(
                f"The model is in {first.dtype} and the inputs are not ({reason}); pass x.to({first.dtype})."
            )
        shapes = [tuple(t.shape) for t in leaves]
        return InputError(
            f"The model refuses inputs of shape {shapes}: {reason}; check the shape that its forward expects."
        )

    def _accepts(self, params: Params, state: Params, x: Inputs, change: Callable[[Tensor], Tensor]) -> bool:
        try:
            keys, leaves = flatten(x)
            self._forward(params, state, unflatten(keys, [change(t) for t in leaves]))
        except (RuntimeError, IndexError):
            return False
        return True


class ModelCoordinates(Coordinates):
    """One model on given data: the values at w₀ are computed once, here."""

    def __init__(self, model: Model, x: Inputs, alpha: float, centred: bool) -> None:
        self.batch = ()
        self.alpha = torch.tensor(alpha, dtype=torch.float64)
        self._model, self._x = model, x
        self._program, self._values = model.base(model.params, model.state, x)
        self._scale = Scale.of(alpha)
        self._offset = offset(self._values[-1], self.alpha, centred)

    def zeros(self) -> dict[str, Tensor]:
        """v = 0."""
        return {name: torch.zeros_like(w) for name, w in self._model.params.items()}

    def outputs(self, v: Params) -> Tensor:
        """y_α(v)."""
        delta = self._program.increment(self._scale, [v[name] for name in self._model.params], self._values)
        return delta if self._offset is None else delta + self._offset

    def kernel(self) -> Tensor:
        """Dh(w₀)Dh(w₀)ᵀ, dense."""
        jacobian = self._model.jacobian(self._x)
        return jacobian @ jacobian.T


# ── doors ──────────────────────────────────────────────────────────────────────────────────────────────────────────
_DROPOUTS = (nn.modules.dropout._DropoutNd,)
_BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)


def _from_module(net: nn.Module) -> tuple[Forward, dict[str, Tensor], dict[str, Tensor]]:
    for name, module in net.named_modules():
        if isinstance(module, _DROPOUTS) and module.training and module.p > 0:
            raise ModelError(
                f"Dropout {name or 'module'!r} is in training mode, so outputs are random; call net.eval() first."
            )
        if isinstance(module, _BATCH_NORMS) and (module.training or module.running_mean is None):
            raise ModelError(
                f"Batch-norm {name or 'module'!r} is in training mode, so outputs depend on the whole batch; call"
                " net.eval() first (it needs track_running_stats=True), or use GroupNorm."
            )
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in net.parameters()):
        raise ModelError("The model has lazy layers without shape yet; run it once on data before Model(net).")
    try:
        kept = copy.deepcopy(net)
    except RuntimeError as error:
        raise ModelError(
            "The module holds tensors that carry a graph and can't be copied; detach them, or use torch.nn.utils."
            f"parametrizations instead of hooks ({str(error).splitlines()[0]})."
        ) from error
    params = {name: p.detach() for name, p in kept.named_parameters() if p.requires_grad}
    frozen = {name: p.detach() for name, p in kept.named_parameters() if not p.requires_grad}
    state = {**frozen, **{name: b.detach() for name, b in kept.named_buffers()}}
    for parameter in kept.parameters():
        parameter.requires_grad_(False)

    def forward(w: Params, s: Params, x: Inputs) -> Any:
        args, kwargs = ((), x) if isinstance(x, Mapping) else (x if isinstance(x, tuple) else (x,), {})
        with plain_kernels():
            return torch.func.functional_call(kept, {**w, **s}, args, dict(kwargs))

    return forward, params, state


def _from_function(function: Callable[..., Any], params: Mapping[str, Any]) -> tuple[Forward, dict[str, Tensor], Any]:
    if not isinstance(params, Mapping) or not all(isinstance(w, Tensor) for w in params.values()):
        raise ModelError("Parameters must be a dict of tensors; pass Model(f, {'name': tensor, …}).")
    start = {name: w.detach().clone() for name, w in params.items() if w.is_floating_point()}
    if len(start) < len(params):
        raise ModelError("Parameters must be floating-point tensors; bind the others into the function.")

    def forward(w: Params, _: Params, x: Inputs) -> Any:
        with plain_kernels():
            return function(w, x)

    return forward, start, {}


def check_output(out: Any) -> Tensor:
    """One floating tensor, or a remedy."""
    if not isinstance(out, Tensor) or not out.is_floating_point():
        raise ModelError(
            f"The model must return one floating-point tensor but returned {type(out).__name__}; wrap it in a module"
            " that returns the output to study."
        )
    return out


def check_inputs(x: Inputs) -> None:
    """Refuse NaN, infinities and what is not made of tensors."""
    leaves = flatten(x)[1]
    if any(t.is_floating_point() and not bool(torch.isfinite(t).all()) for t in leaves):
        raise InputError("The inputs contain NaN or infinity; clean them, for instance with torch.nan_to_num.")


Keys = tuple[str, ...] | int | None
"""How inputs are passed: by name, as so many positional arguments, or as the one tensor."""


def flatten(x: Inputs) -> tuple[Keys, Sequence[Tensor]]:
    """The tensors of the inputs, and how to put them back."""
    if isinstance(x, Tensor):
        return None, (x,)
    keys: Keys = tuple(x) if isinstance(x, Mapping) else len(x) if isinstance(x, tuple) else None
    leaves = tuple(x.values()) if isinstance(x, Mapping) else x
    if not keys or not all(isinstance(t, Tensor) for t in leaves):
        raise InputError("Inputs must be a tensor, a tuple or a dict of tensors; convert arrays with torch.as_tensor.")
    return keys, leaves


def unflatten(keys: Keys, leaves: Sequence[Tensor]) -> Inputs:
    """The inverse of `flatten`."""
    if keys is None:
        return leaves[0]
    return tuple(leaves) if isinstance(keys, int) else dict(zip(keys, leaves, strict=True))


def prefers_speed(device: str) -> bool:
    """Whether torch's own settings trade precision for speed here (autocast, TF32): then w₀'s values follow suit."""
    return torch.is_autocast_enabled(device) or (device == "cuda" and torch.backends.cudnn.allow_tf32)


def signature(t: Tensor) -> tuple[Any, ...]:
    """What a traced program depends on."""
    return tuple(t.shape), t.dtype, t.device.type


def cast(t: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`t.to(…)`; integers keep their dtype."""
    if t.is_floating_point():
        return t.to(*args, **kwargs)
    device = torch._C._nn._parse_to(*args, **kwargs)[0]
    return t if device is None else t.to(device)


def studied(model: Studied | nn.Module) -> Studied:
    """A plain module as the `Model` that it is now; whatever has tangent coordinates as it is."""
    return Model(model) if isinstance(model, nn.Module) else model
