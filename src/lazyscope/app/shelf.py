"""All tabs by name, in their order; a page of each as HTML."""

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
"""Every visitor has a thread; tracing a model and setting torch's threads change state of the whole process."""

_KEPT = 64
"""Pages to remember, of a hundred kilobytes or so: visitors often look at the same settings."""

_pages: OrderedDict[tuple[str, tuple[tuple[str, Value], ...]], str] = OrderedDict()


def page(name: str, values: Values) -> str:
    """The scene of a tab, as one HTML page; on one thread, as all steps are small. Any thread may ask for it.

    Args:
        name: The tab's name.
        values: All of its settings.

    Returns:
        The page.
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
