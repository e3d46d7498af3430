"""Increments of softmax attention, computed without storing a matrix of all queries by all keys.

The formulas are in `attention_blocks`, and the GPU kernels in `triton_attention`. The derivative of Δo is the
derivative of attention at the current point: the current q, k and v are saved, and p is computed again.

A traced graph contains attention as one node, `attention`, which calls torch's fused kernels. `written_out` replaces
the node by core operations, for code that works on the individual operations.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from lazyscope.model.increment.attention_blocks import default_factor, gradients, in_parts, increment
from lazyscope.model.increment.base import RULES, Pair, Scale, applied, base_of, in_transform, linear_map
from lazyscope.model.increment.fused import register_kernels, streams
from lazyscope.model.increment.product import lowered


def _plain(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, factor: float | None, grouped: bool
) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale=factor, enable_gqa=grouped)


traced_attention = torch.library.custom_op(
    "lazyscope::attention",
    _plain,
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, float? factor, bool grouped) -> Tensor",
)
"""Softmax attention as a custom operation, so that a trace records it as one node."""


@traced_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, mask: Any, causal: bool, factor: Any, grouped: bool) -> Tensor:
    return q.new_empty(*q.shape[:-1], v.shape[-1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.options = inputs[4:]


def _pull_back(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    q, k, v, mask = ctx.saved_tensors
    causal, factor, _ = ctx.options
    found = pulled_back(grad, q, k, v, mask, causal, default_factor(factor, q), ctx.needs_input_grad[3])
    return *found, None, None, None


def pulled_back(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Any, causal: bool, factor: float, biased: bool
) -> tuple[Any, ...]:
    """Compute the gradients of attention with respect to q, k, v and, if `biased`, the bias.

    torch's fused kernels are used unless the bias needs a gradient, gradients are recorded or a transform is active.
    """
    if biased or torch.is_grad_enabled() or in_transform():
        *found, bias = gradients(grad, q, k, v, mask, causal, factor)
        return *found, bias if biased else None
    with torch.enable_grad():
        q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
        out = _plain(q, k, v, mask, causal, factor, q.shape[-3] != k.shape[-3])
    return *torch.autograd.grad(out, (q, k, v), grad), None


traced_attention.register_autograd(_pull_back, setup_context=_keep)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    factor: float | None = None,
    grouped: bool = False,
) -> Tensor:
    """Compute softmax attention. Traced graphs call this function, which can be differentiated any number of times."""
    if torch.compiler.is_compiling():
        return _plain(q, k, v, mask, causal, factor, grouped)
    if in_transform():
        return in_parts(q, k, v, mask, causal, factor)
    out: Tensor = traced_attention(q, k, v, mask, causal, factor, grouped)
    return out


def replacement(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention in place of `F.scaled_dot_product_attention` while a forward is traced."""
    if dropout_p > 0.0 or in_transform() or not query.is_floating_point() or query.dim() < 3:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    out: Tensor = traced_attention(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    return out


def named(graph: fx.Graph) -> None:
    """Make the attention nodes of a trace call `attention`, which chooses its kernels when it runs."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target is torch.ops.lazyscope.attention.default:
            node.target = attention
            register_kernels()


def written_out(module: fx.GraphModule) -> fx.GraphModule:
    """Return the same graph with attention written in core operations."""
    if not any(node.target is attention for node in module.graph.nodes):
        return module
    graph, copied, known = fx.Graph(), dict[fx.Node, fx.Node](), dict[Any, fx.Graph]()
    for node in module.graph.nodes:
        if node.target is not attention:
            copied[node] = (
                graph.output(copied[node.args[0]]) if node.op == "output" else graph.node_copy(node, copied.__getitem__)
            )
            continue
        tensors = [each for each in node.args[:4] if isinstance(each, fx.Node)]
        kind = tuple((t.meta["val"].shape, t.meta["val"].dtype) for t in tensors), node.args[4:]
        if kind not in known:
            known[kind] = _in_parts(tensors, node.args[4:])
        places = iter(tensors)
        within: dict[fx.Node, fx.Node] = {}
        for each in known[kind].nodes:
            if each.op == "placeholder":
                within[each] = copied[next(places)]
            elif each.op == "output":
                copied[node] = within[each.args[0]]
            else:
                within[each] = graph.node_copy(each, within.__getitem__)
    return fx.GraphModule(module, graph)


def _in_parts(tensors: list[fx.Node], rest: tuple[Any, ...]) -> fx.Graph:
    """Trace one attention node in core operations."""

    def parts(*given: Any) -> Tensor:
        (q, k, v, mask), (causal, factor) = (*given, None)[:4], (*rest, False, None)[:2]
        return in_parts(q, k, v, mask, causal, factor)

    return make_fx(parts)(*(torch.zeros_like(each.meta["val"]) for each in tensors)).graph


# ── the rule ───────────────────────────────────────────────────────────────────────────────────────────────────────
class _Attention(torch.autograd.Function):
    """The increment Δ of attention. Its derivative is the derivative of attention at the current point."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        q: Tensor,
        dq: Tensor,
        k: Tensor,
        dk: Tensor,
        dv: Tensor,
        bias: Any,
        dbias: Any,
        now_q: Tensor,
        now_k: Tensor,
        now_v: Tensor,
        now_bias: Any,
        epsilon: Any,
        options: tuple[bool, float],
    ) -> Tensor:
        return increment((q, dq, now_q), (k, dk), (now_v, dv), (bias, dbias), epsilon, *options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[7:11])
        ctx.options = inputs[12]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias = ctx.saved_tensors
        causal, factor = ctx.options
        dq, dk, dv, dbias = pulled_back(grads[0], q, k, v, bias, causal, factor, ctx.needs_input_grad[6])
        return None, dq, None, dk, dv, None, dbias, *(None,) * 6


class _StreamedAttention(torch.autograd.Function):
    """The same increment, computed by Triton kernels, which also return the current λ = logsumexp(s) of each query."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
        q, dq, k, dk, dv, bias, dbias, now_q, _now_k, now_v, _now_bias, epsilon, (causal, factor), _start = inputs
        out, level = torch.ops.lazyscope.attention_increment(
            q, dq, now_q, k, dk, now_v, dv, bias, dbias, epsilon, causal, factor
        )
        return out, level

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        out, level = output
        ctx.mark_non_differentiable(level)
        ctx.options = inputs[12]
        now = Pair(inputs[13], out).current(Scale(None, inputs[11]))
        ctx.save_for_backward(*inputs[7:11], now.detach(), level)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *point, out, level = ctx.saved_tensors
        grad = grads[0]
        moving, dbias = ctx.needs_input_grad[6], None
        if torch.is_grad_enabled():  # the kernels have no second derivatives
            dq, dk, dv, dbias = gradients(grad, *point, *ctx.options)
        else:
            dq, dk, dv = torch.ops.lazyscope.attention_gradient(grad, *point, out, level, *ctx.options)
            if moving:
                dbias = torch.ops.lazyscope.attention_bias_gradient(grad, *point, out, level, *ctx.options)
        return None, dq, None, dk, dv, None, dbias if moving else None, *(None,) * 7


def _attention(
    scale: Scale,
    out: Tensor,
    q: Any,
    k: Any,
    v: Any,
    mask: Any = None,
    causal: bool = False,
    factor: float | None = None,
    grouped: bool = False,
) -> Tensor:
    pairs = [each if isinstance(each, Pair) else Pair(each, torch.zeros_like(each)) for each in (q, k, v)]
    if mask is not None and base_of(mask).dim() == 1:
        mask = linear_map(mask, lambda t: t[None])
    moving = isinstance(mask, Pair)
    operands = lowered(
        *(t for each in pairs for t in each),
        base_of(mask),
        mask.delta if moving else None,
        *(each.current(scale) for each in pairs),
        mask.current(scale) if moving else mask,
    )
    q0, dq, k0, dk, _, dv, *rest = operands
    arguments = (q0, dq, k0, dk, dv, *rest, scale.epsilon, (causal, default_factor(factor, q0)))
    if streams(q0, dq, k0, dk, dv) and not isinstance(scale.epsilon, Tensor):
        found: Tensor = applied(_StreamedAttention, *arguments, out.to(q0.dtype))[0]
    else:
        found = applied(_Attention, *arguments)
    return found


RULES[attention] = _attention
