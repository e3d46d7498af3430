"""NNGP and NTK kernels of a module in the limit of infinite width, read from its traced forward.

Longer than 350 lines because the rules and all arguments are documented.
"""

from __future__ import annotations

import copy
import math
from typing import TypedDict

import torch
from jaxtyping import Float
from torch import Tensor, fx, nn

from lazyscope._typing import Inputs
from lazyscope.ambient import without_autocast
from lazyscope.errors import InputError, ModelError
from lazyscope.memory import Memory
from lazyscope.model.base import Model
from lazyscope.model.increment.fused import on_gpu
from lazyscope.model.inputs import flatten
from lazyscope.tangent.limit_arguments import Parametrisation as Parametrisation
from lazyscope.tangent.limit_arguments import check_kind, check_parametrisation, check_samples
from lazyscope.tangent.limit_convolution import fusible, limit_kernel_convolution
from lazyscope.tangent.limit_dense import NUMBERS, Kind
from lazyscope.tangent.limit_field import Field
from lazyscope.tangent.limit_graph import LINEAR, NORMS, LimitGraph, refused, shape
from lazyscope.tangent.limit_rules import dual_of, interpret
from lazyscope.tangent.limit_run import Key, Run, Site
from lazyscope.tangent.limit_stack import convolution_stack
from lazyscope.tangent.limit_variances import Named, Variances, check_distinct, checked_variances, variance_of
from lazyscope.tangent.pairwise import by_slices, working_memory
from lazyscope.tangent.source import digest

aten = torch.ops.aten


class LimitOptions(TypedDict):
    """What determines a limit kernel in addition to the module and the inputs."""

    kind: Kind
    variances: Variances
    parametrisation: Parametrisation


@without_autocast
def limit_kernel(
    net: nn.Module | Model,
    x1: Inputs,
    x2: Inputs | None = None,
    *,
    kind: Kind = "ntk",
    variances: Variances = "default",
    parametrisation: Parametrisation = "ntk",
    memory: Memory | None = None,
) -> Float[Tensor, "n1 n2"]:
    """Compute the kernel of a module as the numbers of its hidden channels tend to infinity.

    The architecture is read from the module's own forward, which is traced on one input, and its operations are
    interpreted as operations on moments of pairs of inputs. The result is Θ(x, x') = lim Dh(w₀,x) Dh(w₀,x')ᵀ ("ntk") or
    Σ(x, x') = lim E h(w₀,x) h(w₀,x') ("nngp") of one output of the module; different outputs are independent. Only the
    architecture and the variances of the parameters matter, not their present values. Parameters that multiply hidden
    units or weights are the exception: their entries must be equal, and they are constants with their present values,
    even if there is only one entry that was drawn at random.

    **Operations.** `Linear`, `Conv1d`, `Conv2d` and `Conv3d` with any stride, zero padding and dilation, and with
    groups of many channels; `Embedding` as the first layer; parameters that are added, such as embeddings of positions;
    ReLU (also as `clamp(min=0)`), leaky ReLU, abs, erf, GELU, sin and cos in closed form; tanh, sigmoid, SiLU and
    softplus by Hermite series, with a relative error below 10⁻¹⁰, if the standard deviation of their inputs is at most
    3.5 for tanh, 7 for sigmoid and SiLU, and 9 for softplus; average pooling, means and sums over positions; reshapes,
    flattening, transposing and slices; residual sums; concatenation of channels; products with numbers; `LayerNorm`
    over the channels, before or after an activation; batch normalisation in evaluation mode with the moments of its
    initialisation. Dropout is replaced by its expectation, the identity. Softmax attention is computed with logits
    q·k/d instead of q·k/√d, where d is the size of a head, as in Hron et al. (2020): pass `scale=1/d` to
    `scaled_dot_product_attention`. Then attention weights converge to those of constant logits if queries and keys have
    different weights, to those of the products of their means if, in addition, both are activations, and to those of
    the second moments of the queries if both are the same tensor; gradients through the logits vanish.

    Other operations are refused, and so are weights that are used more than once, outputs that are activations, and
    activations of inputs that are not normal, such as an activation after another one. Parameters with the same
    entries, such as those of copies by `copy.deepcopy`, are refused too, because they are not independent when training
    starts; draw them anew with `reset_parameters()`. If `variances` is a function or contains both, they are taken to
    be independent unless they share memory.

    **Parametrisation.** In the NTK parametrisation, the default, a parameter is its standard deviation times a standard
    normal variable, and the gradient is taken with respect to that variable. Thus a parameter that starts at a constant
    (a bias that is 0, the weights of a normalisation) does not contribute. In the standard parametrisation, the
    gradient is taken with respect to the parameters, as in `tangent_kernel`; the kernel then grows with the widths of
    the module, and is the leading term for them.

    **Precision.** For networks of linear layers, convolutions, ReLU, leaky ReLU and abs without layer normalisations
    and without averages before an activation, the result is accurate to the rounding of the dtype of the inputs, also
    near x = ±x'. Others are computed in float64, with an error of at most 10⁻⁷ of the largest entry for nearly parallel
    inputs and 10⁻¹⁰ elsewhere. Kernels of modules in float16 and bfloat16 are computed in float32
    or float64, and rounded at the end.

    Args:
        net: The module, or a `Model` of a module or of a function. Its hidden widths only matter for the default
            variances of some layers and in the standard parametrisation.
        x1: The inputs of n1 points.
        x2: The inputs of n2 points, with the same shapes as those of `x1` but for the number of points. `None` uses
            `x1`.
        kind: The kernel to compute: "ntk" or "nngp".
        variances: The variance of the entries of each parameter. "default" uses that of torch's default initialisation
            for `Linear`, `Conv1d`, `Conv2d`, `Conv3d` and `Embedding`, and refuses parameters whose largest entry or
            mean square is unlikely for it (a chance of about 10⁻⁶), unless they are 0. This check is not reliable for
            few entries. "measured" uses the mean square of the present entries. A dictionary gives the variances of
            some parameters by name, and "default" is used for the others. A function of the name and the parameter
            gives all of them.
        parametrisation: "ntk" or "standard".
        memory: The approximate number of bytes to use in addition to the result, as a number or a string such as
            "2GB". The default is 32 MiB on a CPU and, on a GPU, an eighth of its memory or 4 GiB if that is more. At
            least one pair of inputs is processed at a time.

    Returns:
        The kernel, of shape (n1, n2).

    Raises:
        OperationError: If the module contains an operation whose limit is not known; the message names it.
        ModelError: If `net` is not a module or a `Model`, a parameter is used more than once or has the entries of
            another one, its variance is unknown, or the inputs of a tanh, sigmoid, SiLU or softplus are too large.
        InputError: If the inputs, the variances or the memory bound are invalid, or the result does not fit into
            memory.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 1)).double()
        >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
        >>> limit_kernel(net, x)
        tensor([[0.1163, 0.0576],
                [0.0576, 0.1163]], dtype=torch.float64)
    """
    check_kind(kind)
    check_parametrisation(parametrisation)
    check_samples(x1)
    if x2 is not None:
        check_samples(x2)
        _check_alike(x1, x2)
    graph, sites = _read(net, x1, variances, parametrisation, kind)
    return _Kernel(graph, sites, kind == "ntk").compute(x1, x2, memory)


def limit_signature(net: nn.Module | Model, x: Inputs, options: LimitOptions) -> str:
    """Describe everything that a limit kernel depends on, except the inputs: operations, variances and constants.

    Args:
        net: The module.
        x: Inputs of the module.
        options: The options of `limit_kernel`.

    Returns:
        A text that differs for different kernels.
    """
    graph, sites = _read(net, x, options["variances"], options["parametrisation"], options["kind"])
    lines = [f"{node.name} {node.target} {node.args} {node.kwargs} {sites.get(node)}" for node in graph.nodes]
    fixed = _constants(graph)
    return "\n".join([options["kind"], *lines, *([digest(fixed.items())] if fixed else [])])


def _constants(graph: LimitGraph) -> dict[str, Tensor]:
    """The tensors whose present values the kernel depends on: constants, and factors, which have equal entries."""
    found = {}
    for node in graph.nodes:
        name, value = graph.placeholders.get(node, node.name), graph.constants.get(node)
        if node.op not in ("placeholder", "get_attr") or not isinstance(value, Tensor) or not node.users:
            continue
        if graph.classes[node] == "constant" or (name not in graph.drawn and graph.starts_constant(node)):
            found[name] = value
    return found


def _read(
    net: nn.Module | Model, x: Inputs, variances: Variances, parametrisation: Parametrisation, kind: Kind = "ntk"
) -> tuple[LimitGraph, dict[fx.Node, Site]]:
    """Trace the module on the first input, and find the variances of its layers."""
    if not isinstance(net, nn.Module | Model):
        raise ModelError(
            f"limit_kernel takes a module or a lazyscope.Model, not {type(net).__name__}; pass Model(f, params)."
        )
    model = net if isinstance(net, Model) else Model(_without_dropout(_some_trained(net, kind)))
    module = dict(model.submodules()).get("")
    names = [*model.params] if module is None else [name for name, _ in module.named_parameters()]
    rule = checked_variances(variances, names)
    graph = LimitGraph.of(model, x, set(names) - set(model.params))
    sites = _sites(graph, module, rule, parametrisation, kind)
    if isinstance(rule, Named):
        rule.check()
    values = {**model.params, **model.state}
    own = dict(net.named_parameters()) if isinstance(net, nn.Module) else {}
    check_distinct({name: values[name] for name in graph.drawn}, own, rule)
    return graph, sites


def _check_alike(x1: Inputs, x2: Inputs) -> None:
    """Check that two sets of inputs have the same structure, shapes, dtypes and devices."""
    (keys, ones), (others, twos) = flatten(x1), flatten(x2)
    kinds = [[(tuple(t.shape[1:]), t.dtype, t.device) for t in each] for each in (ones, twos)]
    if keys != others:
        raise InputError("x1 and x2 must have the same tuples, dictionaries and constants; pass both in the same way.")
    if kinds[0] != kinds[1]:
        texts = [", ".join(f"{tuple(t.shape)} in {t.dtype} on {t.device}" for t in each) for each in (ones, twos)]
        raise InputError(
            f"x1 and x2 must be alike but for their numbers of points, and are {texts[0]} and {texts[1]}; convert or"
            " crop one of them."
        )


def _some_trained(net: nn.Module, kind: Kind) -> nn.Module:
    """The module itself, or a copy with trainable parameters if it has none and they do not matter."""
    if kind == "ntk" or any(w.requires_grad for w in net.parameters()):
        return net
    net = copy.deepcopy(net)
    for w in net.parameters():
        w.requires_grad_(w.is_floating_point())
    return net


def _without_dropout(net: nn.Module) -> nn.Module:
    """The module itself, or a copy with its dropout in evaluation mode."""
    dropouts = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
    if not any(isinstance(each, dropouts) and each.training for each in net.modules()):
        return net
    net = copy.deepcopy(net)
    for each in net.modules():
        if isinstance(each, dropouts):
            each.eval()
    return net


# ── the parameters of each layer ───────────────────────────────────────────────────────────────────────────────────
def _sites(
    graph: LimitGraph, module: nn.Module | None, rule: Variances, parametrisation: Parametrisation, kind: Kind
) -> dict[fx.Node, Site]:
    followed = kind == "ntk" and parametrisation == "standard"  # whether derivatives by factors matter

    def found(node: fx.Node, argument: object, by: float) -> tuple[float, float]:
        """The variance and the rate of one argument of a layer, which multiplies it by a number."""
        if argument is None:
            return 0.0, 0.0
        weight = graph.weights.get(argument) if isinstance(argument, fx.Node) else None
        if weight is None or not isinstance(argument, fx.Node):
            raise refused(
                node,
                "its weights, on the right, must be one parameter, or a rearrangement of it times a number; remove what"
                " computes them from parameters or hidden units, such as a weight normalisation",
            )
        if followed and graph.trained(argument) - {weight.name}:
            raise refused(node, "a trained parameter multiplies its weights in the standard parametrisation; freeze it")
        value = {**graph.model.params, **graph.model.state}[weight.name]
        taken = graph.drawn.setdefault(weight.name, [])
        if any(bool(torch.isin(weight.entries, each).any()) for each in taken):
            raise ModelError(
                f"Parameter {weight.name!r} is used more than once, so that layers are not independent; use different"
                " parameters for them."
            )
        taken.append(weight.entries)
        owner = None if module is None else module.get_submodule(weight.name.rpartition(".")[0])
        square = (by * weight.factor) ** 2
        variance = variance_of(weight.name, value, rule, owner) * square
        if weight.name not in graph.model.params:
            return variance, 0.0
        return variance, variance if parametrisation == "ntk" else square

    sites = {}
    for node in graph.nodes:
        normalises = graph.classes.get(node) == "input" and node.target in NORMS
        if normalises and followed and _trained_factor(graph, node):
            raise refused(node, "its weights are trained in the standard parametrisation; freeze them")
        if graph.classes.get(node) != "hidden":
            continue
        weight: object = None
        bias: object = None
        if node.target in LINEAR:
            weight, bias = node.args[-1], node.args[0] if node.target is aten.addmm.default else None
        elif node.target is aten.convolution.default:
            weight, bias = node.args[1:3]
        elif node.target is aten.embedding.default:
            weight = node.args[0]
        elif node.target in (aten.add.Tensor, aten.sub.Tensor):
            bias = next((a for a in node.args if isinstance(a, fx.Node) and graph.classes[a] == "weight"), None)
        elif followed and _trained_factor(graph, node):
            raise refused(node, "its weights are trained in the standard parametrisation; freeze them")
        if weight is not None or bias is not None:
            factors = [float(str(node.kwargs.get(each, 1))) for each in ("alpha", "beta")]
            by = factors if node.target is aten.addmm.default else (1.0, 1.0)
            sites[node] = Site(*found(node, weight, by[0]), *found(node, bias, by[1]))
    return sites


def _trained_factor(graph: LimitGraph, node: fx.Node) -> bool:
    return any(graph.trained(each) for each in node.all_input_nodes if graph.classes[each] == "weight")


# ── the kernel of all pairs ────────────────────────────────────────────────────────────────────────────────────────
class _Kernel:
    """The interpretation of a graph for all pairs of inputs, block by block."""

    def __init__(self, graph: LimitGraph, sites: dict[fx.Node, Site], tangent: bool) -> None:
        self._graph, self._sites, self._tangent = graph, sites, tangent
        hidden = [node for node in graph.nodes if graph.classes.get(node) == "hidden"]
        duals = [dual_of(node) for node in hidden]
        # A layer normalisation subtracts squared means from second moments, which loses digits.
        normed = any(node.target is aten.native_layer_norm.default for node in hidden)
        wide = normed or graph.own_moments or any(dual is not None and dual.smooth for dual in duals)
        self._dtype = torch.float64 if wide else torch.promote_types(shape_dtype(graph), torch.float32)

    def compute(self, x1: Inputs, x2: Inputs | None, memory: Memory | None) -> Tensor:
        first = self._evaluated(x1)
        second = first if x2 is None else self._evaluated(x2)
        kernels = [each for side in (first, second) for each in side.values()]
        dtype, device = shape_dtype(self._graph), kernels[0].device
        stack = convolution_stack(self._graph, self._sites) if on_gpu(kernels[0]) else None
        if stack is not None and fusible(kernels, stack.options["kernel_size"]):
            images = first[stack.inputs], None if x2 is None else second[stack.inputs]
            kind: Kind = "ntk" if self._tangent else "nngp"
            return limit_kernel_convolution(*images, kind=kind, memory=memory, **stack.options).to(dtype)
        side = math.isqrt(working_memory(memory, device) // (NUMBERS * self._numbers() * self._dtype.itemsize))
        own = None
        if self._graph.own_moments:
            step = max(1, side * side)
            own = self._own(first, step), {} if x2 is None else self._own(second, step)
            own = own if x2 is not None else (own[0], own[0])
        n1 = len(kernels[0])
        sizes = n1, None if x2 is None else len(next(iter(second.values())))

        def block(i: slice, j: slice) -> Tensor:
            left, right = ({node: t[i][None] for node, t in first.items()}, {n: t[j][None] for n, t in second.items()})
            cut: tuple[dict[Key, Tensor], dict[Key, Tensor]] = ({}, {})
            if own is not None:
                cut = {n: t[i] for n, t in own[0].items()}, {n: t[j] for n, t in own[1].items()}
            run = Run(self._graph, self._sites, self._tangent, left, right, cut, self._dtype)
            return self._finished(run).to(dtype)

        followed = torch.is_grad_enabled() and any(each.requires_grad for each in kernels)
        like = torch.empty(0, dtype=dtype, device=device)
        return by_slices(block, sizes, like, side, followed, "limit kernel")

    def _evaluated(self, x: Inputs) -> dict[fx.Node, Tensor]:
        found = self._graph.evaluate(x)
        return {n: t.to(self._dtype) if t.is_floating_point() else t for n, t in found.items()}

    def _numbers(self) -> int:
        """The largest number of positions, or of pairs of positions, of a hidden node."""
        most = 1
        for node, need in self._graph.needs.items():
            if self._graph.classes.get(node) == "hidden":
                field = shape(node)
                channel = field[1] if len(field) > 2 else math.prod(field[-1:])  # an output may have no axes
                places = math.prod(field) // max(channel, 1)
                most = max(most, places**2 if need.pairs else places)
        return most

    def _own(self, side: dict[fx.Node, Tensor], step: int) -> dict[Key, Tensor]:
        """The moments of each input with itself."""
        n = len(next(iter(side.values())))
        found: dict[Key, list[Tensor]] = {}
        for start in range(0, n, step):
            rows = {node: t[start : start + step, None] for node, t in side.items()}
            run = Run(self._graph, self._sites, False, rows, rows, None, self._dtype)
            self._finished(run)
            for key, t in run.found.items():
                found.setdefault(key, []).append(t)
        return {key: torch.cat(each) for key, each in found.items()}

    def _finished(self, run: Run) -> Tensor:
        last: dict[fx.Node, fx.Node] = {}
        for node in self._graph.nodes:
            for each in node.all_input_nodes:
                last[each] = node
        for node in self._graph.nodes:
            if self._graph.classes.get(node) == "hidden":
                run.fields[node] = interpret(run, node)
                for each in node.all_input_nodes:
                    if last[each] is node:
                        run.fields.pop(each, None)
        return self._kernel(run.fields[self._graph.result], run.tangent)

    def _kernel(self, field: Field, tangent: bool) -> Tensor:
        node = self._graph.result
        if field.places:
            raise refused(node, "the output has positions; return an average of them, or one of them")
        if len(field.parts) != 1:
            raise refused(node, "the output is a concatenation, whose parts have different kernels; return one of them")
        (part,) = field.parts
        if part.law != "normal":
            raise refused(node, "the output is not that of a layer with weights; leave out the last activation")
        if tangent and part.tangent is None:
            return torch.zeros_like(part.second[0, 0])
        value = part.tangent if tangent else part.second
        assert value is not None
        return value[0, 0]


def shape_dtype(graph: LimitGraph) -> torch.dtype:
    """The dtype of the output."""
    value = graph.result.meta["val"]
    assert isinstance(value, Tensor)
    return value.dtype
