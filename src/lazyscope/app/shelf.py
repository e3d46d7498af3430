"""The list of all tabs, and their scenes, of which the last ones are kept."""

from __future__ import annotations

import threading
from collections import OrderedDict

from lazyscope.app.alpha import TAB as ALPHA
from lazyscope.app.convex import TAB as CONVEX
from lazyscope.app.deconvolution import TAB as DECONVOLUTION
from lazyscope.app.diagonal import TAB as DIAGONAL
from lazyscope.app.grokking import TAB as GROKKING
from lazyscope.app.margin import TAB as MARGIN
from lazyscope.app.risks import TAB as RISKS
from lazyscope.app.setting import Value, Values
from lazyscope.app.tab import Tab
from lazyscope.app.teacher import TAB as TEACHER
from lazyscope.linalg.threads import threads_for

TABS: dict[str, Tab] = {
    tab.name: tab for tab in (TEACHER, ALPHA, DIAGONAL, GROKKING, CONVEX, DECONVOLUTION, MARGIN, RISKS)
}


_ONE_AT_A_TIME = threading.Lock()
"""Each request has its own thread, but tracing a model and setting the number of threads affect the whole process."""

_KEPT = 64
"""The number of scenes in the cache. A scene has about 100 kB, and the same settings are often requested again."""

_scenes: OrderedDict[tuple[str, tuple[tuple[str, Value], ...]], str] = OrderedDict()


def scene(name: str, values: Values) -> str:
    """Compute the scene of a tab. This function is thread-safe.

    The computation runs on one thread, because all its steps are small.

    Args:
        name: The name of the tab.
        values: The values of all its settings.

    Returns:
        The scene as JSON, for `player.js`.
    """
    key = name, tuple(sorted(values.items()))
    with _ONE_AT_A_TIME:
        if key not in _scenes:
            with threads_for(0):
                _scenes[key] = TABS[name].draw(values).json()
        _scenes.move_to_end(key)
        while len(_scenes) > _KEPT:
            _scenes.popitem(last=False)
        return _scenes[key]
