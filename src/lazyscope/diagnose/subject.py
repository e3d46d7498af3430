"""The network that a monitor studies: a copy at its start w₀, and the displacement of the trained one from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lazyscope._typing import Inputs, Params
from lazyscope.errors import InputError, ModelError
from lazyscope.model.base import Model
from lazyscope.model.forward import Output, copied, unwrapped
from lazyscope.model.increment import Scale
from lazyscope.model.inputs import Samples
from lazyscope.model.transform import Scaled, TangentModule

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_HALVES = (torch.float16, torch.bfloat16)


@final
class ProbeNorm(nn.Module):
    """Batch normalisation with the mean and the variance of the present batch, as in training, without buffers.

    Args:
        norm: The batch normalisation whose parameters are used.
    """

    def __init__(self, norm: nn.modules.batchnorm._BatchNorm) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise a batch.

        Args:
            x: The batch, of shape (n, channels, …).

        Returns:
            The normalised batch.
        """
        return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)


@final
class Subject:
    """A trained network together with a copy of it at the start of the training.

    The copy is in evaluation mode, so that dropout is off. Batch normalisation that is in training mode when the copy
    is made uses the statistics of the probe, as the training uses those of its batches; in evaluation mode, it uses its
    buffers at the start. Weights in half precision are studied in float32.

    Args:
        net: The module that is trained.
        output: The part of its output to study, as in `Model`.
        start: The state dict of the module at the start. `None` takes the present weights.

    Attributes:
        model: The model at w₀, whose parameters are those that are trained.
    """

    def __init__(self, net: nn.Module, output: Output, start: Mapping[str, Any] | None) -> None:
        self.net, self._output = unwrapped(net), output
        self._copy: nn.Module | None = None
        if isinstance(self.net, TangentModule):
            if start is not None:
                raise InputError("Scaled and Linearised modules hold w₀ themselves; load their own state dict instead.")
            self.model = self.net.model_now()
            return
        self._copy = _probed(copied(self.net)).eval()
        if start is not None:
            self._restore(start)
        if any(p.dtype in _HALVES for p in self._copy.parameters()):
            self._copy.float()
        self.model = Model(self._copy, output=output)

    def _restore(self, start: Mapping[str, Any]) -> None:
        assert self._copy is not None
        own = {**dict(self._copy.named_parameters()), **dict(self._copy.named_buffers())}
        missing = [name for name in dict(self._copy.named_parameters()) if name not in start]
        if missing:
            raise InputError(f"The weights at the start lack {missing[0]!r}; pass net.state_dict() of this network.")
        with torch.no_grad():
            for name, tensor in own.items():
                if name in start:
                    if start[name].shape != tensor.shape:
                        raise InputError(
                            f"{name!r} has the shape {tuple(start[name].shape)} at the start and"
                            f" {tuple(tensor.shape)} now; pass net.state_dict() of this network."
                        )
                    tensor.copy_(start[name])

    @property
    def plain(self) -> bool:
        """Whether the network is not a `Scaled` or `Linearised` module."""
        return self._copy is not None

    @property
    def alpha(self) -> float:
        """The scale α with w = w₀ + v/α: 1 for a plain network, and that of a `Scaled` or `Linearised` module."""
        return self.net.alpha if isinstance(self.net, TangentModule) else 1.0

    @property
    def centred(self) -> bool:
        """Whether the outputs start at zero, because the network is a centred `Scaled` module."""
        return isinstance(self.net, Scaled) and self.net.centred

    def weights(self) -> dict[str, Tensor]:
        """Return w₀, frozen parameters and buffers included, on the CPU; empty for `Scaled` and `Linearised`."""
        if self._copy is None:
            return {}
        return {name: tensor.detach().cpu().clone() for name, tensor in self._copy.state_dict().items()}

    def inputs(self, x: Inputs) -> Inputs:
        """Move the probe to the device of the network, and cast half precision to float32 with the network."""
        device = next(iter(self.model.params.values())).device
        return Samples(Samples(x).to(device)).map(
            lambda t: t.float() if self._copy is not None and t.dtype in _HALVES else t
        )

    def displacement(self) -> dict[str, Tensor]:
        """Compute the coordinates v with w = w₀ + v/α.

        Returns:
            The coordinates by parameter name.

        Raises:
            ModelError: If the network no longer has one of the parameters.
        """
        found = {name: p.detach() for name, p in self.net.named_parameters()}
        missing = [name for name in self.model.params if name not in found]
        if missing:
            raise ModelError(
                f"The network no longer has the parameter {missing[0]!r}; create a new monitor after changing layers."
            )
        studied = {name: self.model.as_studied(name, found[name]) for name in self.model.params}
        if isinstance(self.net, TangentModule):
            return studied
        return {name: studied[name].to(w) - w for name, w in self.model.params.items()}

    def outputs(self, x: Inputs, v: Params) -> Tensor | None:
        """Compute the outputs of a `Scaled` or `Linearised` module at given parameters.

        Args:
            x: The inputs.
            v: The parameters v by name.

        Returns:
            The outputs, or `None` for a plain network, whose outputs are those of the model.
        """
        if not isinstance(self.net, TangentModule):
            return None
        scale, model = Scale.of(self.alpha), self.model
        with torch.no_grad():
            present = model.increment(model.params, model.state, x, scale, self.displacement())[1]
            asked = model.increment(model.params, model.state, x, scale, v)[1]
            found: Tensor = self.net(x)
        return found + (asked - present)

    def initial(self, start: Tensor) -> Tensor:
        """Compute the outputs of the network at its start, which for `Scaled` modules are not those of the model.

        Args:
            start: The outputs h(w₀) of the model.

        Returns:
            0 for a centred `Scaled` module, αh(w₀) for one that is not centred, and otherwise h(w₀).
        """
        if not isinstance(self.net, Scaled):
            return start
        return torch.zeros_like(start) if self.net.centred else self.net.alpha * start

    def trained(self) -> list[str]:
        """Return the names of the parameters that are trained now: those that are not frozen."""
        free = {name for name, p in self.net.named_parameters() if p.requires_grad}
        return [name for name in self.model.params if name in free]

    def include(self, names: list[str] | None = None) -> bool:
        """Study parameters that were frozen at the start and are trained now, or have changed since.

        Args:
            names: The names of these parameters. `None` finds them.

        Returns:
            Whether the model has changed.
        """
        if self._copy is None:
            return False
        known, start = set(self.model.params), dict(self._copy.named_parameters())
        if names is None:
            names = [
                name
                for name, p in self.net.named_parameters()
                if name in start and (p.requires_grad or not torch.equal(p.detach().to(start[name]), start[name]))
            ]
        fresh = set(names) - known
        if fresh:
            for name, p in start.items():
                p.requires_grad_(name in known or name in fresh)
            self.model = Model(self._copy, output=self._output)
        return bool(fresh)

    def layers(self) -> dict[str, tuple[str, ...]]:
        """Group the parameters by the submodule that holds them."""
        found: dict[str, list[str]] = {}
        for name in self.model.params:
            found.setdefault(layer_of(name), []).append(name)
        return {layer: tuple(names) for layer, names in found.items()}


def layer_of(parameter: str) -> str:
    """Return the name of the submodule of a parameter, or the name of a parameter of the network itself.

    Args:
        parameter: The name of the parameter, such as `"blocks.0.weight"`.

    Returns:
        The name of the layer. Tensors of a parametrisation belong to the layer that is parametrised.

    Example:
        >>> layer_of("blocks.0.weight"), layer_of("bias"), layer_of("0.parametrizations.weight.original0")
        ('blocks.0', 'bias', '0')
    """
    layer = parameter.partition(".parametrizations.")[0] if ".parametrizations." in parameter else ""
    return layer or parameter.rpartition(".")[0] or parameter


def _probed(net: nn.Module) -> nn.Module:
    """Replace batch normalisation in training mode, in a copy of a network."""
    for parent in list(net.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, _NORMS) and type(child) in _NORMS and (child.training or child.running_mean is None):
                setattr(parent, name, ProbeNorm(child))
    return ProbeNorm(net) if isinstance(net, _NORMS) and type(net) in _NORMS and net.training else net
