"""Take the screenshots of the explorer: run `python -m docs.screenshots` from the root, with Chromium installed."""

from __future__ import annotations

from pathlib import Path

from tests.app.visitor import Visitor, chromium, explorer

SHOTS = {
    "teacher": {},
    "teacher-lazy": {"tab": "teacher", "tau": "4"},
    "alpha": {},
    "diagonal": {},
    "grokking": {},
    "convex": {"step": "1.9"},
    "deconvolution": {},
    "margin": {},
    "risks": {},
}
"""The names of the screenshots, and the settings in the link that each one shows."""


WIDTH = 1360


def main() -> None:
    """Take one screenshot per link, as tall as the page content."""
    assets = Path(__file__).parent / "assets"
    with explorer() as address, chromium() as browser:
        for name, link in SHOTS.items():
            visitor = Visitor(browser, address, width=WIDTH)
            visitor.open(**{"tab": name, **link})
            footer = visitor.page.locator("footer").bounding_box()
            assert footer is not None
            visitor.page.set_viewport_size({"width": WIDTH, "height": round(footer["y"])})
            visitor.picture(assets / f"explore-{name}.png")
            visitor.page.close()
            print(f"{name}: errors {visitor.errors}, requests to other hosts {visitor.strangers}")


if __name__ == "__main__":
    main()
