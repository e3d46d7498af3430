"""Measure how long the explorer takes to draw a change, with the default and with the most expensive settings.

    python -m benchmarks.explore [--browser]

If other programs share the cores, use the processor time. With `--browser`, the times are also measured in a real
browser, by its clock: from a key press, a click on a switch or a selection until the new plot is shown.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from lazyscope.app.setting import Steps, Value
from lazyscope.app.shelf import TABS
from lazyscope.linalg.threads import threads_for

if TYPE_CHECKING:
    from tests.app.visitor import Visitor

ROUNDS = 2
WAIT, PAUSE = 1500, 100
"""Milliseconds: the longest time that a plot may take, and the pause between the three key presses of a drag."""


def measure(name: str, values: dict[str, Value]) -> tuple[float, float, int]:
    """Measure the wall-clock and processor seconds of a scene, the best of `ROUNDS`, and its size."""
    TABS[name].draw(values)  # warm up
    found, size = [], 0
    for _ in range(ROUNDS):
        wall, processor = time.perf_counter(), time.process_time()
        with threads_for(0):  # as the server does; the cache of the server is not used
            size = len(TABS[name].draw(values).json())
        found.append((time.perf_counter() - wall, time.process_time() - processor))
    return min(one[0] for one in found), min(one[1] for one in found), size


def heaviest(name: str) -> dict[str, Value]:
    """Return the settings with every size at its maximum; scales and seeds keep their defaults."""
    tab = TABS[name]
    sizes = {"width", "samples", "neurons", "steps", "side", "dim", "base", "depth"}
    largest: dict[str, Value] = {
        key: setting.values[-1] for key, setting in tab.settings.items() if key in sizes and isinstance(setting, Steps)
    }
    costly: dict[str, dict[str, Value]] = {
        "teacher": {"loss": "logistic", "symmetrised": False},
        "deconvolution": {"start": "10×10 grid"},
        "risks": {"target": "mixture of Gaussians"},
    }
    return {**tab.read({}), **largest, **costly.get(name, {})}


def through_the_browser() -> None:
    """Measure the seconds until the plot is shown, after a click on a tab, a change, and the last key of a drag."""
    from tests.app.visitor import Visitor, chromium, explorer

    with explorer() as address, chromium() as browser:
        visitor = Visitor(browser, address)
        clicks = {}
        for name in [*list(TABS)[1:], *list(TABS)[:1]]:
            _rest(visitor, next(other for other in TABS if other != name), {})
            begin = time.time()
            visitor.page.get_by_role("tab", name=TABS[name].title).click()
            visitor.page.wait_for_timeout(WAIT)
            clicks[name] = visitor.drawn[-1] - begin
        print("switch to tab", ", ".join(f"{name} {value:.2f}" for name, value in clicks.items()))
        for name, tab in TABS.items():
            for word, values in (("defaults", tab.read({})), ("heaviest", heaviest(name))):
                changes, drags = {}, {}
                for key, setting in tab.settings.items():
                    if name == "convex" and key == "start":  # the quadratic in the plane draws its own start
                        continue
                    _rest(visitor, name, values)
                    begin = time.time()
                    visitor.nudge(key, setting, values[key])
                    visitor.page.wait_for_timeout(WAIT)
                    changes[key] = visitor.drawn[-1] - begin
                    if isinstance(setting, Steps):
                        _rest(visitor, name, {**values, key: setting.values[0]})
                        begin = visitor.drag(key, 3, PAUSE)
                        visitor.page.wait_for_timeout(WAIT)
                        drags[key] = visitor.drawn[-1] - begin
                for kind, seconds in (("change", changes), ("drag", drags)):
                    shown = ", ".join(f"{key} {value:.2f}" for key, value in seconds.items())
                    print(f"{name:14} {word}  {kind:6} {max(seconds.values()):.2f} s at most ({shown})", flush=True)


def _rest(visitor: Visitor, name: str, values: Mapping[str, Value]) -> None:
    """Open the page with these settings, and wait until it is idle."""
    tab = TABS[name]
    visitor.open(**tab.link({**tab.read({}), **values}))
    visitor.page.wait_for_timeout(300)
    visitor.drawn.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the response times of the explorer.")
    parser.add_argument("--browser", action="store_true", help="also measure through a real browser")
    options = parser.parse_args()
    for name, tab in TABS.items():
        for word, values in (("defaults", tab.read({})), ("heaviest", heaviest(name))):
            wall, processor, size = measure(name, values)
            print(f"{name:14} {word}  {wall:.2f} s, processor {processor:.2f} s, scene {size / 1000:.0f} kB")
    if options.browser:
        through_the_browser()


if __name__ == "__main__":
    main()
