"""The list of all tabs, and the rendering of their pages."""

from __future__ import annotations

import threading
from collections import OrderedDict

from lazyscope.app.convex import TAB as CONVEX
from lazyscope.app.deconvolution import TAB as DECONVOLUTION
from lazyscope.app.margin import TAB as MARGIN
from lazyscope.app.risks import TAB as RISKS
from lazyscope.app.setting import Value, Values
from lazyscope.app.tab import Tab
from lazyscope.app.teacher import TAB as TEACHER
from lazyscope.linalg.threads import threads_for

TABS: dict[str, Tab] = {tab.name: tab for tab in (TEACHER, CONVEX, DECONVOLUTION, MARGIN, RISKS)}


_ONE_AT_A_TIME = threading.Lock()
"""Each open page has its own thread, but tracing a model and setting the number of threads affect the whole process."""

_KEPT = 64
"""The number of pages in the cache. A page has about 100 kB, and the same settings are often requested again."""

_pages: OrderedDict[tuple[str, tuple[tuple[str, Value], ...]], str] = OrderedDict()


def page(name: str, values: Values) -> str:
    """Render the scene of a tab as an HTML page. This function is thread-safe.

    The computation runs on one thread, because all its steps are small.

    Args:
        name: The name of the tab.
        values: The values of all its settings.

    Returns:
        The page as HTML.
    """
    key = name, tuple(sorted(values.items()))
    with _ONE_AT_A_TIME:
        if key not in _pages:
            with threads_for(0):
                _pages[key] = TABS[name].draw(values).html()
        _pages.move_to_end(key)
        while len(_pages) > _KEPT:
            _pages.popitem(last=False)
        return _pages[key]
