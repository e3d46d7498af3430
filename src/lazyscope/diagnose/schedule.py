"""When a monitor measures: every so many steps, or within a share of the time of the training."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import final

from lazyscope.arguments import check_count
from lazyscope.errors import InputError

_GROWTH = 1.02
"""The smallest ratio of the steps of two measurements, which bounds their number in a long run."""


class Schedule(ABC):
    """Decides at which steps a monitor measures."""

    @abstractmethod
    def due(self, step: int) -> bool:
        """Return whether to measure at this step.

        Args:
            step: The training step.
        """

    @abstractmethod
    def spent(self, step: int, seconds: float) -> None:
        """Take note of a measurement.

        Args:
            step: The training step.
            seconds: The duration of the measurement.
        """


@final
class Every(Schedule):
    """Measure every so many steps.

    Args:
        steps: The number of steps between two measurements.

    Raises:
        InputError: If the number is not positive.
    """

    def __init__(self, steps: int) -> None:
        check_count("every", steps, least=0)
        if steps < 1:
            raise InputError(f"The number of steps between two measurements is {steps}; pass every=1 or more.")
        self._steps = steps

    def due(self, step: int) -> bool:
        """Return whether the step is a multiple of the number of steps."""
        return step % self._steps == 0

    def spent(self, step: int, seconds: float) -> None:
        """Do nothing."""


@final
class WithinBudget(Schedule):
    """Measure as often as a share of the time of the training allows, and at steps that grow by at least 2 %.

    A measurement starts only if all measurements so far, and one more that takes as long as the last one, fit into the
    share of the time that has passed since the first step. The measurement at the start, before the first step, is not
    counted but gives the first estimate.

    Args:
        share: The share of the time, between 0 and 1.

    Raises:
        InputError: If the share is not between 0 and 1.
    """

    def __init__(self, share: float) -> None:
        if not 0 < share < 1:
            raise InputError(f"The share of the time for measurements is {share}; pass, for instance, budget=0.02.")
        self._share, self._total, self._last, self._next = share, 0.0, 0.0, 1.0
        self._begin: float | None = None

    def due(self, step: int) -> bool:
        """Return whether the measurements fit into the budget."""
        now = time.perf_counter()
        if self._begin is None:
            self._begin = now
        return step >= self._next and self._total + self._last <= self._share * (now - self._begin)

    def spent(self, step: int, seconds: float) -> None:
        """Add the duration to the total."""
        self._last, self._next = seconds, step * _GROWTH
        if self._begin is not None:
            self._total += seconds
