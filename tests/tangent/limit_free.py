"""Small modules whose forward is given, for tests of limit kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.tangent.wide import normal
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as attention

W = 12
Forward = Callable[[Any, Tensor], Tensor]


class Free(nn.Module):
    """Layers of one width, and a forward that combines them."""

    def __init__(self, forward: Forward, **more: Any) -> None:
        super().__init__()
        self.how = forward
        self.start, self.out = nn.Linear(3, W), nn.Linear(W, 1)
        self.a, self.b, self.c, self.d = (nn.Linear(W, W) for _ in range(4))
        for name, value in more.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self, x)


def variance(_: str, w: Tensor) -> float:
    return 1.5 / w[0].numel() if w.ndim > 1 else 0.1


def times(**factors: float) -> Callable[[str, Tensor], float]:
    """The same variances, with those of some parameters multiplied by numbers."""
    return lambda name, w: variance(name, w) * factors.get(name.replace(".", "_"), 1.0)


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Attention with one head and logits q·k/d."""
    return attention(q[:, None], k[:, None], v[:, None], scale=1 / q.shape[-1], **options)[:, 0]


def attending(choose: Callable[[Any, Tensor], tuple[Tensor, Tensor]], **more: Any) -> Free:
    """One layer of attention, whose queries and keys are chosen."""
    return Free(lambda s, x: (lambda h: s.out(attend(*choose(s, h), s.c(h)).mean(1)))(s.start(x)), **more)


def dense(*start: nn.Module) -> nn.Module:
    return nn.Sequential(*start, nn.Linear(3, W), nn.ReLU(), nn.Linear(W, 1))


points, tokens, signals = normal(3, 3), normal(3, 5, 3), normal(2, 4, 2, 6)
