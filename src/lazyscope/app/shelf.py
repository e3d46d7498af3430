"""All tabs by name, in their order; a page of each as HTML."""

from __future__ import annotations

from lazyscope.app.convex import TAB as CONVEX
from lazyscope.app.deconvolution import TAB as DECONVOLUTION
from lazyscope.app.margin import TAB as MARGIN
from lazyscope.app.risks import TAB as RISKS
from lazyscope.app.setting import Values
from lazyscope.app.tab import Tab
from lazyscope.app.teacher import TAB as TEACHER
from lazyscope.linalg.threads import threads_for

TABS: dict[str, Tab] = {tab.name: tab for tab in (TEACHER, CONVEX, DECONVOLUTION, MARGIN, RISKS)}


def page(name: str, values: Values) -> str:
    """The scene of a tab, as one HTML page; on one thread, as all steps are small."""
    with threads_for(0):
        return TABS[name].draw(values).html()
