"""Build `play/index.html`, a page that trains a two-layer net in the browser, when the site is built.

The result is one file that needs no server and no network access. The random numbers are those of the library, so that
the page and the library train the same networks; a test compares their trajectories.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from lazyscope.app.compute.student import POINTS, circle_teacher, student
from lazyscope.data.sphere import sphere

FOLDER = Path(__file__).parent / "play"
SEEDS, WIDTHS, SAMPLES, NEURONS = range(12), (4, 8, 20, 50), (5, 10, 15, 30), 3


def on_files(files: Files, *, config: MkDocsConfig, **_: Any) -> Files:
    """Add the page. MkDocs calls this once."""
    files.append(File.generated(config, "play/index.html", content=page()))
    return files


def page() -> str:
    """Return the page with its style, its scripts and the random numbers inside."""
    parts = {"style": "play.css", "net": "net.js", "play": "play.js"}
    texts = {name: (FOLDER / file).read_text(encoding="utf-8") for name, file in parts.items()}
    html = (FOLDER / "page.html").read_text(encoding="utf-8")
    for name, text in {**texts, "draws": f"const DRAWS = {json.dumps(draws(), separators=(',', ':'))};"}.items():
        html = html.replace(f"{{{{ {name} }}}}", text)
    return html


def draws() -> dict[str, Any]:
    """Return the random numbers of the library: teacher, samples and initialisations, in float32, for each seed."""
    return {"widths": WIDTHS, "samples": SAMPLES, "seeds": {seed: _seed(seed) for seed in SEEDS}}


def _seed(seed: int) -> dict[str, Any]:
    return {
        "signs": circle_teacher(NEURONS, seed).a.tolist(),
        "points": _short(sphere(POINTS, 2, [seed])[0, : NEURONS + max(SAMPLES)]),
        "nets": {width: _half(width, seed) for width in WIDTHS},
    }


def _half(width: int, seed: int) -> dict[str, list[float]]:
    """Return one neuron of each pair of a symmetrised network."""
    net = student(width, seed, symmetrised=True)
    return {"a": _short(net.a[: width // 2]), "b": _short(net.b[: width // 2])}


def _short(values: Any) -> list[float]:
    """Return float32 numbers with the nine digits that determine them."""
    return [float(f"{value:.9g}") for value in values.flatten().tolist()]
