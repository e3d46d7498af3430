"""Fine-tuning: a network that is trained on half of the classes of a data set is adapted to the others.

It is adapted in full, by factors of low rank beside each linear layer, or by its head only. Only the last is exactly
linear in what is trained.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lazyscope.data.cifar10 import cifar10
from lazyscope.data.digits import digits
from lazyscope.loss import CrossEntropy
from lazyscope.model.lora import low_rank
from lazyscope.model.transform import Linearised
from lazyscope.model.vit import ViT
from lazyscope.stream import stream

OLD = 5
"""The classes below this number are those of the pretraining."""

HEAD = "head"
"""The name of the last layer of the networks, which is drawn again for new classes."""

LOSS = CrossEntropy()
_PRETRAIN, _NET, _HEAD, _BATCHES = range(4)
"""The parts of a seed's random numbers."""

Data = tuple[Tensor, Tensor]
"""Images and their classes."""


class Perceptron(nn.Module):
    """A net with two hidden layers and smooth activations, for images of 8×8 pixels.

    Args:
        width: The number of neurons of both hidden layers.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(64, width), nn.Linear(width, width), nn.Linear(width, OLD)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the outputs."""
        hidden = nn.functional.gelu(self.first(0.35 * x.flatten(1)))
        out: Tensor = self.head(nn.functional.gelu(self.second(hidden)))
        return out


@dataclass(frozen=True)
class Setting:
    """A network, its data, and how it is trained."""

    net: Callable[[], nn.Module]
    data: Callable[[], tuple[Data, Data]]
    """The images for training and those for tests."""
    epochs: int
    """The number of epochs of the pretraining."""
    batch: int
    """The number of images of a batch."""
    train: int
    """The number of images of the fine-tuning, of all new classes."""
    probe: int
    """The number of these images on which a run is predicted and watched."""
    test: int
    """The number of unseen images on which outputs are compared."""
    steps: int
    """The number of steps of the fine-tuning."""
    lr: float
    """The learning rate of Adam, in the pretraining and in the fine-tuning."""
    momentum: float = 0.9
    """The momentum of SGD."""


def _digits() -> tuple[Data, Data]:
    x, labels = digits(seed=0)
    return (x[:1000], labels[:1000]), (x[1000:], labels[1000:])


SETTINGS = {
    "MLP on digits": Setting(partial(Perceptron, 32), _digits, 20, 64, 48, 48, 200, 50, 0.01),
    "ViT on CIFAR-10": Setting(
        partial(ViT, channels=3, side=32, patch=4, width=96, depth=4, heads=4, outputs=OLD),
        lambda: (cifar10("train"), cifar10("test")),
        *(30, 128, 2048, 128, 1000, 300, 1e-3),
    ),
}


@dataclass(frozen=True)
class Pretrained:
    """A network that knows the old classes."""

    net: nn.Module
    accuracy: float
    """Its accuracy on unseen images of the old classes."""


@cache
def pretrained(name: str, device: torch.device) -> Pretrained:
    """Train a network on the old classes, once per process.

    Args:
        name: The name of a setting.
        device: The device.

    Returns:
        The network, which must not be modified.
    """
    setting = SETTINGS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream(0, _NET).initial_seed())
        net = setting.net().to(device)
    (x, labels), unseen = (_chosen(part, range(OLD), device) for part in setting.data())
    optimiser, random = torch.optim.Adam(net.parameters(), lr=setting.lr), stream(0, _PRETRAIN)
    steps = setting.epochs * (len(x) // setting.batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, setting.lr, total_steps=steps, cycle_momentum=False)
    for _ in range(setting.epochs):
        for rows in torch.randperm(len(x), generator=random, device="cpu").to(device).split(setting.batch):
            if len(rows) == setting.batch:
                _step(optimiser, net, x[rows], labels[rows])
                schedule.step()
    return Pretrained(net.eval(), accuracy(net, *unseen))


def new_data(name: str, classes: tuple[int, ...], device: torch.device) -> tuple[Data, Data]:
    """Load images of new classes.

    Args:
        name: The name of a setting.
        classes: The classes, which are numbered from 0 in this order.
        device: The device.

    Returns:
        The images of the fine-tuning, and unseen images.
    """
    setting = SETTINGS[name]
    parts = zip(setting.data(), (setting.train, setting.test), strict=True)
    first, unseen = (_chosen(part, classes, device, count) for part, count in parts)
    return first, unseen


def _chosen(data: Data, classes: Any, device: torch.device, count: int | None = None) -> Data:
    """The first images of some classes, whose labels become 0, 1, …"""
    x, labels = data
    wanted = torch.tensor([*classes], device="cpu")
    rows = torch.isin(labels, wanted).nonzero().flatten()[:count]
    return x[rows].to(device), (labels[rows][:, None] == wanted).int().argmax(1).to(device)


def adapted(net: nn.Module, method: str, outputs: int) -> nn.Module:
    """Copy a network, give it a new head, and choose what is trained.

    Args:
        net: The network.
        method: "full", "head", "LoRA r" for factors of rank r beside all other linear layers, or "body" for all
            but the head.
        outputs: The number of outputs of the new head, whose weights have the variance 1/d for d inputs.

    Returns:
        The network; parameters that are not trained are frozen.
    """
    net = copy.deepcopy(net)
    old = net.get_submodule(HEAD)
    assert isinstance(old, nn.Linear)
    head = nn.Linear(old.in_features, outputs).to(old.weight)
    start = torch.randn(outputs, old.in_features, generator=stream(0, _HEAD), device="cpu") / math.sqrt(old.in_features)
    with torch.no_grad():
        head.weight.copy_(start)
        head.bias.zero_()
    setattr(net, HEAD, head)
    if method.startswith("LoRA"):
        return low_rank(net, int(method.removeprefix("LoRA ")), trained=(HEAD,))
    net.requires_grad_(method in ("full", "body"))
    head.requires_grad_(method != "body")
    return net


def optimiser_of(net: nn.Module, kind: str, setting: Setting, curvature: float = 1.0) -> torch.optim.Optimizer:
    """Build the optimiser of a run.

    Args:
        net: The module to train.
        kind: "SGD" or "Adam".
        setting: The setting, which has the learning rate of Adam and the momentum of SGD.
        curvature: The largest curvature of the loss. The learning rate of SGD is 2(1 - momentum)/curvature, a tenth or
            less of what is stable.

    Returns:
        The optimiser.
    """
    trained = [w for w in net.parameters() if w.requires_grad]
    if kind == "Adam":
        return torch.optim.Adam(trained, lr=setting.lr)
    return torch.optim.SGD(trained, lr=2 * (1 - setting.momentum) / curvature, momentum=setting.momentum)


def fine_tune(net: nn.Module, optimiser: torch.optim.Optimizer, data: Data, batch: int, steps: int) -> None:
    """Take steps on the batches of a fixed stream, which are the same for all networks.

    Args:
        net: The module that the optimiser trains.
        optimiser: The optimiser.
        data: The images and their classes.
        batch: The number of images of a batch; all images if there are no more.
        steps: The number of steps.
    """
    x, y = data
    random = stream(0, _BATCHES)
    for _ in range(steps):
        if batch < len(x):
            rows = torch.randperm(len(x), generator=random, device="cpu")[:batch].to(x.device)
            _step(optimiser, net, x[rows], y[rows])
        else:
            _step(optimiser, net, x, y)


def _step(optimiser: torch.optim.Optimizer, net: nn.Module, x: Tensor, y: Tensor) -> None:
    optimiser.zero_grad()
    LOSS(net(x), y).backward()
    optimiser.step()


@torch.no_grad()
def outputs_of(net: Callable[[Tensor], Tensor], x: Tensor, size: int = 500) -> Tensor:
    """Compute outputs, `size` images at a time."""
    return torch.cat([net(part) for part in x.split(size)])


def accuracy(net: Callable[[Tensor], Tensor], x: Tensor, labels: Tensor) -> float:
    """Compute the share of images that are classified correctly."""
    return float((outputs_of(net, x).argmax(1) == labels).double().mean())


@dataclass(frozen=True)
class Task:
    """One of two tasks: a network with a head of its own, what fine-tuning changed, and unseen images."""

    net: nn.Module
    start: dict[str, Tensor]
    vector: dict[str, Tensor]
    """The task vector τ = w - w₀ of the body."""
    x: Tensor
    labels: Tensor


def task_vector(name: str, classes: tuple[int, ...], linear: bool, device: torch.device) -> Task:
    """Fit a head to the features of the pretrained network, freeze it, and fine-tune the body.

    Args:
        name: The name of a setting.
        classes: The classes of the task.
        linear: Whether the tangent model is trained.
        device: The device.

    Returns:
        The task with its vector.
    """
    setting, base = SETTINGS[name], pretrained(name, device).net
    data, unseen = new_data(name, classes, device)
    probed = adapted(base, "head", len(classes))
    fine_tune(probed, optimiser_of(probed, "Adam", setting), data, setting.batch, setting.steps)
    net = adapted(base, "body", len(classes))
    net.get_submodule(HEAD).load_state_dict(probed.get_submodule(HEAD).state_dict())
    start = {key: w.detach().clone() for key, w in net.named_parameters() if w.requires_grad}
    if linear:
        module: nn.Module = Linearised(net)
        fine_tune(module, optimiser_of(module, "Adam", setting), data, setting.batch, setting.steps)
        vector = {key: v.detach().clone() for key, v in module.named_parameters()}
    else:
        fine_tune(net, optimiser_of(net, "Adam", setting), data, setting.batch, setting.steps)
        vector = {key: w.detach() - start[key] for key, w in net.named_parameters() if key in start}
    return Task(net, start, vector, *unseen)


def disentanglement(tasks: tuple[Task, Task], linear: bool, coefficients: Tensor) -> tuple[Tensor, Tensor]:
    """Add multiples of two task vectors, and compare the predictions with those of each task's own vector.

    The disentanglement error of Ortiz-Jiménez et al. (2023) is ξ(a, b) = P(f₁(aτ₁) ≠ f₁(aτ₁ + bτ₂)) + P(f₂(bτ₂) ≠
    f₂(aτ₁ + bτ₂)), where f_t(v) are the predictions of the network with the weights w₀ + v for images of task t.

    Args:
        tasks: The two tasks.
        linear: Whether the predictions are those of the tangent model.
        coefficients: The values of a and of b, which contain 0.

    Returns:
        The error for each pair (a, b), and the accuracy on each task, of shape (2, a, b).
    """
    count = len(coefficients)
    error, hits = torch.zeros(count, count, device="cpu"), torch.zeros(2, count, count, device="cpu")
    zero = int((coefficients == 0).nonzero()[0])
    for t, task in enumerate(tasks):
        model = _tangent(task, tasks) if linear else _plain(task, tasks)
        predicted = torch.stack([torch.stack([model(a, b).argmax(1) for b in coefficients]) for a in coefficients])
        alone = predicted[:, zero : zero + 1] if t == 0 else predicted[zero : zero + 1]
        error += (predicted != alone).float().mean(-1).cpu()
        hits[t] = (predicted == task.labels).float().mean(-1).cpu()
    return error, hits


Sum = Callable[[Tensor, Tensor], Tensor]
"""The outputs for the images of a task at w₀ + aτ₁ + bτ₂, as a function of a and b."""


def _plain(task: Task, tasks: tuple[Task, Task]) -> Sum:
    def outputs(a: Tensor, b: Tensor) -> Tensor:
        first, second = (other.vector for other in tasks)
        w = {key: start + float(a) * first[key] + float(b) * second[key] for key, start in task.start.items()}
        return outputs_of(lambda x: functional_call(task.net, w, (x,)), task.x)

    return outputs


def _tangent(task: Task, tasks: tuple[Task, Task]) -> Sum:
    tangent = Linearised(task.net, centred=True)
    initial, moves = outputs_of(task.net, task.x), []
    for other in tasks:
        tangent.load_state_dict(other.vector, strict=False)
        moves.append(outputs_of(tangent, task.x))
    return lambda a, b: initial + float(a) * moves[0] + float(b) * moves[1]
