"""The page that `lazyscope explore` serves: a marimo notebook that arranges the tabs, settings and scenes."""

from types import ModuleType
from typing import Any

import marimo

app = marimo.App(width="full", app_title="lazyscope explorer", css_file="explorer.css")


@app.cell
def _imports() -> Any:
    import marimo as mo

    from lazyscope.app import panel

    return mo, panel


@app.cell
def _tabs(mo: ModuleType, panel: ModuleType) -> Any:
    tabs = panel.tabs(mo)
    controls = panel.controls(mo)
    return controls, tabs


@app.cell
def _settings(controls: Any, mo: ModuleType, panel: ModuleType, tabs: Any) -> None:
    mo.sidebar(panel.settings(mo, tabs.value, controls), width="320px")
    return


@app.cell
def _heading(mo: ModuleType, panel: ModuleType, tabs: Any) -> None:
    mo.vstack([tabs, panel.story(mo, tabs.value)], gap=0.5)
    return


@app.cell
def _picture(controls: Any, mo: ModuleType, panel: ModuleType, tabs: Any) -> None:
    panel.picture(mo, tabs.value, controls.value)
    return


if __name__ == "__main__":
    app.run()
