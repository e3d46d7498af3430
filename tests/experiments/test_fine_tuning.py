"""Fine-tuning: what is trained, the task vectors, and claims that hold on planted results and fail on wrong ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lazyscope.experiments import fine_tuning as module
from lazyscope.lab.experiment import Result, Trial, Trials
from lazyscope.lab.style import style
from lazyscope.model.transform import Linearised
from lazyscope.problem import fine_tuning as problem

CPU, NAME = torch.device("cpu"), "MLP on digits"


def made(*, order: float = 1.0, verdict: str = "lazy", head: float = 0.0, linear: float = 0.1) -> Trials:
    """Lazy runs whose deviation is a power of the criterion, a linear head, and constant errors."""
    trials = []
    for place, point in enumerate(module.grid("quick")):
        if point["kind"] == "run":
            alphas = np.array([float(each) for each in str(point["scales"]).split()])
            criterion = (place + 1) / alphas if point["method"] != "head" else np.zeros(1)
            deviation = 0.01 * (0.1 * criterion) ** order if point["method"] != "head" else np.array([head])
            result: Result = {"criterion": criterion, "worst": criterion, "deviation": deviation, "gap": deviation}
            result |= {"accuracy": 0 * alphas + 0.9, "loss": 0 * alphas, "tangent_accuracy": 0.9}
            result["verdicts"] = ", ".join([verdict] * len(alphas))
        else:
            size = len(module.COEFFICIENTS)
            result = {f"accuracy_{word}": np.ones((2, size, size)) for word in ("plain", "linear")}
            result |= {"error_plain": np.full((size, size), 0.2), "error_linear": np.full((size, size), linear)}
        trials.append(Trial(point, result))
    return Trials(trials)


def test_claims_hold_and_can_fail() -> None:
    def holding(trials: Trials) -> list[bool]:
        return [claim.holds for claim in module.claims(trials)]

    assert holding(made()) == [True] * 4
    assert holding(made(order=-1.0)) == [False, False, True, True]
    assert holding(made(verdict="in between")) == [True, False, True, True]
    assert holding(made(head=1e-3))[2] is False
    assert holding(made(linear=0.3)) == [True, True, True, False]


def test_the_figure_is_drawn() -> None:
    with style():
        page = module.figure(made())
    assert len(page.axes) == 5


@pytest.mark.parametrize(("method", "count"), [("full", 6), ("head", 2), ("body", 4), ("LoRA 2", 6)])
def test_a_method_trains_its_parameters(method: str, count: int) -> None:
    net = problem.adapted(problem.Perceptron(8), method, 3)
    assert sum(w.requires_grad for w in net.parameters()) == count
    assert net(torch.zeros(2, 1, 8, 8)).shape == (2, 3)


def test_pretraining_is_shared_and_learns() -> None:
    base = problem.pretrained(NAME, CPU)
    assert base is problem.pretrained(NAME, CPU)
    assert base.accuracy > 0.9


def test_tasks_are_those_of_the_sum_of_their_vectors() -> None:
    tasks = tuple(problem.task_vector(NAME, classes, True, CPU) for classes in ((5, 6), (7, 8, 9)))
    coefficients = torch.tensor([0.0, 1.0])
    error, hits = problem.disentanglement(tasks, True, coefficients)  # type: ignore[arg-type]
    assert error[0, 0] == 0
    first = tasks[0]
    tangent = Linearised(first.net)
    with torch.no_grad():
        for name, v in tangent.named_parameters():
            v.copy_(tasks[0].vector[name] + tasks[1].vector[name])
        expected = (tangent(first.x).argmax(1) == first.labels).float().mean()
    assert hits[0, 1, 1] == pytest.approx(float(expected), abs=0.01)
    assert hits[0, 1, 0] > hits[0, 0, 0]  # its own vector helps


def test_a_head_alone_is_linear() -> None:
    point = next(p for p in module.grid("quick") if p.get("method") == "head" and p["optimiser"] == "Adam")
    (found,) = module.trial([point], CPU)
    assert np.asarray(found["criterion"]).max() == 0
    assert np.asarray(found["deviation"]).max() < 1e-5
    assert found["verdicts"] == "lazy"
