"""A coordinate check: whether the layers of a net change by the same amount however wide and deep it is."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import nn

from lazyscope._typing import Inputs, Number
from lazyscope.ambient import without_autocast
from lazyscope.arguments import check_count, check_number
from lazyscope.errors import InputError
from lazyscope.extras import required
from lazyscope.labels import Target
from lazyscope.loss import Loss
from lazyscope.model.inputs import check_samples
from lazyscope.phase.probe import Measured, layers_of, measure

if TYPE_CHECKING:
    from matplotlib.figure import Figure
else:
    Figure = Any  # matplotlib is imported when a figure is drawn

FLAT = 0.25
"""The largest exponent that counts as none. Wrong factors have exponents that are multiples of ½."""


@without_autocast
def coordinate_check(
    factory: Callable[..., nn.Module],
    widths: Sequence[int],
    depths: Sequence[int] | None = None,
    *,
    x: Inputs,
    y: Target,
    lr: Number,
    loss: Loss | None = None,
    steps: int = 3,
    seeds: int = 3,
    layers: Sequence[str] | None = None,
) -> CoordinateCheck:
    """Check a parametrisation: whether every layer changes by the same amount at every width and depth.

    Nets of all widths are trained for a few steps of gradient descent with the same learning rate. With maximal
    updates, the outputs of each layer change by amounts that depend neither on the width nor on the depth. If they
    decrease, training becomes lazy or stops; if they increase, it diverges. A layer is named as wrong if the growth of
    its outputs at the start, or its effective learning rate, which are properties of this layer alone, depend on the
    width in another way than maximal updates require. Over depths, layers whose names differ in numbers only form a
    group, which is wrong if the change of the net's output that it causes depends on the depth.

    The changes are computed as increments and not as differences of outputs, so that they are exact in float32 however
    small the learning rate is.

    Args:
        factory: A function from the width, or from the width and the depth if `depths` is given, to a module. It is
            called with torch's global random state set to the seed.
        widths: The widths, at least three unless there are depths. All are built with the first depth.
        depths: The depths, at least three if they are given. All are built with the first width.
        x: The inputs of some samples.
        y: The targets in the form that the loss takes.
        lr: The learning rate of all nets.
        loss: The loss, one of `lazyscope.loss`. `None` is cross-entropy for class indices and the square loss for
            numbers.
        steps: The number of steps.
        seeds: The number of nets of each size, over which logarithms are averaged.
        layers: The names of the layers to check. `None` checks all modules that own trainable parameters.

    Returns:
        The check: `right`, a `verdict` in words, the `wrong` layers, the exponents, and a `figure()`.

    Raises:
        InputError: If the data are invalid, or there are too few widths or depths.
        ModelError: If a net cannot be studied, or a layer runs more than once or does not return one tensor.

    Example:
        >>> from lazyscope import parametrise
        >>> def build(width: int) -> nn.Module:
        ...     return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))
        >>> x = torch.linspace(-1, 1, 8)[:, None] ** torch.arange(3)
        >>> found = coordinate_check(build, [64, 256, 1024], x=x, y=x[:, :1], lr=0.1)
        >>> found.right, sorted(found.wrong)
        (False, ['0', '2'])
        >>> def scaled(width: int) -> nn.Module:
        ...     return parametrise(build(width), "mup", build(64))
        >>> coordinate_check(scaled, [64, 256, 1024], x=x, y=x[:, :1], lr=0.1).right
        True
    """
    check_samples(x)
    _check_numbers(lr, steps, seeds, layers)
    _check_sizes(widths, depths, steps, seeds)
    told = {"x": x, "y": y, "loss": loss, "lr": float(lr), "steps": steps, "layers": layers}
    wide = deep = None
    if len(widths) > 1:
        rest = () if depths is None else (depths[0],)
        wide = _Series.over(list(widths), seeds, lambda size: factory(size, *rest), grouped=False, **told)
    if depths is not None:
        deep = _Series.over(list(depths), seeds, lambda size: factory(widths[0], size), grouped=True, **told)
    return CoordinateCheck(wide, deep)


def _check_numbers(lr: Any, steps: Any, seeds: Any, layers: Any) -> None:
    check_number("lr", lr, least=0)
    if lr == 0:
        raise InputError("lr=0 trains nothing, so that there are no updates to compare; pass lr > 0.")
    check_count("steps", steps, least=0)
    check_count("seeds", seeds, least=0)
    if isinstance(layers, Sized) and not layers:
        raise InputError("There are no layers to compare; pass their names, or None for all of them.")


def _check_sizes(widths: Sequence[int], depths: Sequence[int] | None, steps: int, seeds: int) -> None:
    for name, sizes in (("widths", widths), ("depths", depths)):
        if sizes is None and name == "depths":
            continue
        if isinstance(sizes, str) or not isinstance(sizes, Iterable):
            raise InputError(f"The {name} are {sizes!r}; pass a list of at least three different positive numbers.")
        for size in sizes:
            check_count(f"One of the {name}", size)
    for name, sizes in (("widths", widths), ("depths", depths)):
        alone = name == "widths" and depths is not None and len(widths) == 1
        if sizes is not None and not alone and (len(set(sizes)) < 3 or min(sizes) < 1):
            raise InputError(f"The {name} are {list(sizes)}; pass at least three different positive numbers.")
    if steps < 1 or seeds < 1:
        raise InputError(f"There are {steps} steps and {seeds} seeds; pass at least one of each.")


@final
@dataclass(frozen=True)
class _Series:
    """The measurements over one kind of size: root mean squares over the layers of a group, averaged over seeds."""

    sizes: np.ndarray
    tables: dict[str, dict[str, np.ndarray]]
    """For each quantity of `Measured`, and for each group of layers, the values over the sizes."""
    fans: dict[str, np.ndarray]
    """For each group, the coordinates of its input and of its output over the sizes."""
    repeated: frozenset[str]
    """The groups of several layers."""

    @staticmethod
    def over(sizes: list[int], seeds: int, build: Callable[[int], nn.Module], *, grouped: bool, **told: Any) -> _Series:
        rows: list[list[tuple[Measured, dict[str, str]]]] = []
        wanted = told.pop("layers")
        for size in sizes:
            rows.append([])
            for seed in range(seeds):
                with torch.random.fork_rng():
                    torch.manual_seed(seed)
                    net = build(size)
                names = layers_of(net) if wanted is None else tuple(wanted)
                groups = {name: re.sub(r"\d+", "#", name) if grouped else name for name in names}
                rows[-1].append((measure(net, **told, groups=groups), groups))
        kinds = list(dict.fromkeys(rows[0][0][1].values()))
        if any(list(dict.fromkeys(groups.values())) != kinds for line in rows for _, groups in line):
            raise InputError("The nets have different layers; build them with one architecture.")
        tables = {
            what: {kind: np.array([_mean(line, what, kind) for line in rows]) for kind in [*kinds, ""]}
            for what in ("start", "change", "own", "rate", "vector_rate", "effect")
        }
        fans = {
            kind: np.array([line[0][0].sizes[_first(line[0][1], kind)] for line in rows], dtype=float) for kind in kinds
        }
        several = [kind for kind in kinds if any(list(line[0][1].values()).count(kind) > 1 for line in rows)]
        return _Series(np.array(sizes, dtype=float), tables, fans, frozenset(several))

    def slope(self, what: str, kind: str) -> float:
        """The exponent of a quantity in the size; minus infinity if it is zero."""
        values = self.tables[what][kind]
        if not np.isfinite(values).all():
            return math.inf
        if not (values > 0).all():
            return -math.inf
        return float(np.polyfit(np.log(self.sizes), np.log(values), 1)[0])

    @cached_property
    def wrong(self) -> dict[str, str]:
        """The groups that depend on the size in a wrong way, with the reason."""
        found: dict[str, str] = {}
        for kind, fan in self.fans.items():
            into, out = (np.ptp(column) > 0 for column in fan.T)
            start = self.slope("start", kind)
            # The outputs of a layer that reads a growing input but does not grow itself must not outgrow their mean.
            least, most = (-math.inf, -0.5 + FLAT) if into and not out else (-FLAT, FLAT)
            said, why = "at most -0.5" if into and not out else "0", []
            if kind in self.repeated:
                effect = self.slope("effect", kind)
                if abs(effect) > FLAT:
                    why.append(f"the change of the output that it causes has the exponent {effect:.2f} instead of 0")
            else:
                if start != -math.inf and not least <= start <= most:
                    why.append(f"its outputs at the start have the exponent {start:.2f} instead of {said}")
                for what, weights in (("rate", "matrices"), ("vector_rate", "vectors")):
                    rate = self.slope(what, kind)
                    if rate != -math.inf and abs(rate) > FLAT:  # it is zero if the layer has no such weights
                        why.append(f"the learning rate of its {weights} is wrong by the exponent {rate:.2f}")
            if why:
                found[kind] = " and ".join(why)
        return found


def _mean(line: list[tuple[Measured, dict[str, str]]], what: str, kind: str) -> float:
    """The geometric mean over seeds of the root mean square over the layers of a group."""
    values = []
    for measured, groups in line:
        table: Mapping[str, float] = getattr(measured, what)
        some = [table[name] for name in groups if groups[name] == kind and name in table and what != "effect"]
        some = some or [table.get(kind, math.nan)]
        values.append(math.sqrt(sum(value**2 for value in some) / len(some)))
    return float(np.exp(np.mean(np.log(values)))) if min(values) > 0 else (math.nan if math.isnan(sum(values)) else 0.0)


def _first(groups: Mapping[str, str], kind: str) -> str:
    return next(name for name, group in groups.items() if group == kind)


@final
@dataclass(frozen=True, repr=False)
class CoordinateCheck:
    """The result of `coordinate_check`."""

    over_widths: _Series | None
    """The measurements over widths, or None."""
    over_depths: _Series | None
    """The measurements over depths, or None."""

    @property
    def wrong(self) -> dict[str, str]:
        """The wrongly scaled layers, with the reason. Over depths, # stands for all numbers."""
        return {name: why for series in self._all for name, why in series.wrong.items()}

    @property
    def right(self) -> bool:
        """Whether no layer is wrong, and the output of the net changes by the same amount at every size."""
        return not self.wrong and all(abs(series.slope("change", "")) <= FLAT for series in self._all)

    @property
    def verdict(self) -> str:
        """The verdict in words."""
        if self.right:
            return "The scaling is right: every layer changes by the same amount at every size."
        slopes = [series.slope("change", kind) for series in self._all for kind in series.tables["change"]]
        what = (
            "diverges as the net grows"
            if max(slopes) > FLAT
            else "becomes lazy as the net grows"
            if min(slopes) < -FLAT
            else "depends on the size of the net in some layers"
        )
        named = "; ".join(f"'{name}': {why}" for name, why in self.wrong.items())
        return f"The scaling is wrong: training {what}. {named or 'No single layer is at fault'}."

    def slopes(self, what: str = "change", over: str = "widths") -> dict[str, float]:
        """Return the exponents of a quantity in the width or in the depth.

        Args:
            what: "change", the change of a layer's outputs; "own", the part that its own weights cause; "start", the
                size of its outputs at the start over that of its inputs; "rate" and "vector_rate", the effective
                learning rates of its matrices and vectors relative to those of maximal updates; or "effect", the
                change of the net's output that its weights cause.
            over: "widths" or "depths".

        Returns:
            The exponents by layer. The name "" is the output of the net.

        Raises:
            InputError: If there was no such measurement.
        """
        series = {"widths": self.over_widths, "depths": self.over_depths}.get(over)
        if series is None or what not in series.tables:
            raise InputError(f"There is no '{what}' over {over}; pass several of these sizes to the check.")
        return {
            kind: series.slope(what, kind) for kind, values in series.tables[what].items() if values[0] == values[0]
        }

    def figure(self) -> Figure:
        """Draw the change of every layer against the width and the depth, with its exponent.

        Returns:
            The figure, of matplotlib.

        Raises:
            MissingExtraError: If matplotlib is not installed.
        """
        required("matplotlib", "inspect", "Pictures of a check")
        from lazyscope.lab.style import panels, style

        with style():
            page, axes = panels(1, len(self._all), width=4.6, height=3.4)
            for axis, series in zip(axes[0], self._all, strict=True):
                for kind, values in series.tables["change"].items():
                    label = f"{kind or 'output'}: {series.slope('change', kind):+.2f}"
                    axis.plot(series.sizes, values, "--x" if kind in series.wrong else "-o", ms=4, label=label)
                name = "width" if series is self.over_widths else "depth"
                axis.set(xscale="log", yscale="log", xlabel=name, title="right" if self.right else "wrong (dashed)")
                axis.legend(fontsize=8, title="exponent", title_fontsize=8)
            axes[0, 0].set(ylabel="change of the coordinates")
        return page

    @property
    def _all(self) -> list[_Series]:
        return [series for series in (self.over_widths, self.over_depths) if series is not None]

    def __repr__(self) -> str:
        return f"CoordinateCheck({self.verdict})"
