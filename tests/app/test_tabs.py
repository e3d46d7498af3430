"""Every tab without a browser: all settings are drawn and kept in links, pages are self-contained, numbers correct."""

from __future__ import annotations

import json
import math
import re
from base64 import b64decode
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from lazyscope.app import alpha, convex, deconvolution, diagonal, grokking, margin, risks, teacher
from lazyscope.app.page import document, embedded
from lazyscope.app.plane import bend, bent
from lazyscope.app.scene import Axis, packed, plain
from lazyscope.app.setting import Setting, Steps, Value
from lazyscope.app.shelf import TABS, scene
from lazyscope.problem.convex import PROBLEMS
from lazyscope.problem.quadratic import hidden_widths


def options(setting: Setting) -> list[Value]:
    return list(setting.offered)


QUICK: dict[str, dict[str, Value]] = {
    "margin": {"steps": 50, "samples": 15},
    "deconvolution": {"steps": 100},
    "grokking": {"steps": 300, "base": 9, "width": 60},
}
CASES = [
    (name, key, value)
    for name, tab in TABS.items()
    for key, setting in tab.settings.items()
    for value in ([options(setting)[0], options(setting)[-1]] if isinstance(setting, Steps) else options(setting))
    if value != setting.default
]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for tab in (teacher, alpha):
        monkeypatch.setattr(tab, "STEPS", 40)
        monkeypatch.setattr(tab, "FRAMES", 8)


def data_of(page: str) -> dict[str, object]:
    found = re.search(r"const SCENE = (.*?);\n", page)
    assert found is not None
    data: dict[str, object] = json.loads(found.group(1))
    return data


@pytest.mark.parametrize(("name", "key", "value"), CASES)
def test_every_end_of_every_setting_draws(name: str, key: str, value: Value) -> None:
    values = {**TABS[name].read({}), **QUICK.get(name, {}), key: value}
    drawn = TABS[name].draw(values)
    count = len(drawn.moments)
    assert count > 1
    assert all(len(number.values) in (1, count) for number in drawn.numbers)
    assert all(number.meaning and all(number.values) for number in drawn.numbers)
    for panel in drawn.panels:
        assert panel.x.low < panel.x.high
        assert panel.y.low < panel.y.high
    assert json.loads(drawn.json())["name"] == name


@pytest.mark.parametrize("name", list(TABS))
@given(st.data())
@settings(deadline=None, max_examples=30)
def test_links_hold_the_settings(name: str, data: st.DataObject) -> None:
    tab = TABS[name]
    values = {key: data.draw(st.sampled_from(options(setting))) for key, setting in tab.settings.items()}
    link = tab.link(values)
    assert link["tab"] == name
    assert all(isinstance(text, str) for text in link.values())
    assert tab.read(link) == values
    assert tab.link(tab.read({})) == {"tab": name}


@given(st.text())
@settings(deadline=None, max_examples=15)
def test_nonsense_in_a_link_is_the_default(text: str) -> None:
    for tab in TABS.values():
        for setting in tab.settings.values():
            assert setting.parse(text) in options(setting)


@pytest.mark.parametrize("name", list(TABS))
def test_pages_ask_for_nothing(name: str) -> None:
    class Links(HTMLParser):
        found: list[str] = []  # noqa: RUF012

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.found += [str(value) for key, value in attrs if key in ("src", "href")]

    tab = TABS[name]
    values = {**tab.read({}), **QUICK.get(name, {})}
    text = document(tab.title, tab.caption(values), scene(name, values))
    parser = Links()
    parser.feed(text)
    assert all(link.startswith("data:") for link in parser.found)
    assert set(re.findall(r"https?://[^\"' )]+", text)) == {"http://www.w3.org/2000/svg"}  # only a namespace
    assert data_of(text)["name"] == name


def test_a_page_cannot_be_broken_out_of() -> None:
    text = document("</title><b>", ["</p><b>"], json.dumps({"name": "</script><b>"}))
    assert "</script><b>" not in text
    assert "</title><b>" not in text
    assert "</p><b>" not in text.partition("<script>")[0]
    assert data_of(text.replace("<\\/", "</"))["name"] == "</script><b>"
    assert json.loads(embedded("</script>").replace("<\\/", "</")) == "</script>"


@pytest.mark.parametrize("name", list(TABS))
def test_presets_and_equations_name_settings_and_their_values(name: str) -> None:
    tab = TABS[name]
    assert 3 <= len(tab.presets) <= 9, "one key for each"
    for changed in tab.presets.values():
        assert all(value in options(tab.settings[key]) for key, value in changed.items())
    links = [tab.link({**tab.read({}), **changed}) for changed in tab.presets.values()]
    assert len({tuple(link.items()) for link in links}) == len(links), "no two presets are the same"
    spec = tab.spec()
    named = [key for _, key in spec["equation"] if key]
    assert next(iter(tab.settings)) in named or name == "margin", "the main setting has a symbol"
    assert set(named) <= set(tab.settings)
    assert "{" not in "".join(text for text, _ in spec["equation"])
    assert len(tab.caption(tab.read({}))) == len(tab.settings)


@given(st.floats(1e-3, 1e3), st.floats(0, 2 * math.pi), st.floats(0.1, 1.0))
@settings(deadline=None)
def test_a_bent_plane_keeps_directions_and_order(radius: float, angle: float, linear: float) -> None:
    way = torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64)
    there = bend(radius * way, linear)
    assert torch.allclose(there, bent(radius, linear) * way, rtol=1e-9)
    assert bent(1.01 * radius, linear) > bent(radius, linear)


def test_the_frame_of_the_neurons_does_not_depend_on_the_scale() -> None:
    tab = TABS["teacher"]
    frames = []
    for tau in (0.05, 4.0):
        panels = tab.draw({**tab.read({}), "tau": tau}).panels
        frames.append([(panel.x, panel.y) for panel in panels])
        arrows = next(mark for mark in plain(panels[0])["marks"] if mark["kind"] == "arrows")
        tips = (
            np.frombuffer(b64decode(arrows["x"]["packed"]), "<f4"),
            np.frombuffer(b64decode(arrows["y"]["packed"]), "<f4"),
        )
        assert np.hypot(*tips) / panels[0].x.high == pytest.approx(0.54, abs=0.01)
    assert frames[0] == frames[1]


@given(arrays(np.float64, (3, 4), elements=st.floats(-1e9, 1e9, allow_subnormal=False)))
@settings(deadline=None)
def test_numbers_reach_the_browser_in_float32(values: np.ndarray) -> None:
    sent = packed(values)
    read = np.frombuffer(b64decode(sent["packed"]), "<f4").reshape(sent["shape"])
    assert np.array_equal(read, values.astype(np.float32))
    assert plain(torch.from_numpy(values)) == plain(values) == sent


def test_what_is_not_finite_is_not_drawn() -> None:
    assert packed(np.array([1e300])) == packed(np.array([math.inf]))  # the player draws neither value
    assert plain(math.inf) is None
    assert Axis.decades([0.0, math.nan, 1.0, 100.0]) == Axis(1 / 1.5, 150.0, log=True)


def test_the_teacher_tab_turns_lazy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher, "STEPS", 300)
    values = TABS["teacher"].read({})
    feature, lazy = (teacher.compute(teacher.Settings(**{**values, "tau": tau})) for tau in (0.1, 5.0))  # type: ignore[arg-type]
    assert feature.scale.kappa > 1 > 0.1 > lazy.scale.kappa
    assert feature.displacement[-1] > 100 * lazy.displacement[-1]
    assert feature.drift[-1] > 100 * lazy.drift[-1]
    assert feature.stability[-1] < lazy.stability[-1]
    words = [number.meaning for number in teacher.scene(lazy).numbers if "κ" in number.name]
    assert "lazy" in words[0]


@pytest.mark.parametrize("formula", list(convex.NAMES))
@pytest.mark.parametrize("step", [0.5, 2.5])
def test_verdicts_on_convex_descents(formula: str, step: float) -> None:
    result = convex.compute(convex.Settings(formula, step, 2.03, 10, 80, 1))
    verdict = convex.scene(result).numbers[-1].values[0]
    smooth = math.isfinite(result.problem.smoothness)
    if convex.NAMES[formula] == "huber" and step > 2:
        assert verdict == "oscillates"  # the iterates stay bounded
    elif convex.NAMES[formula] == "c" and step > 2:
        assert verdict == "diverges"  # the function is quadratic in x
    elif smooth:
        assert (verdict == "diverges") == (step > 2)
    else:
        assert verdict == "oscillates"
    assert set(convex.NAMES.values()) == set(PROBLEMS)


def test_the_certificate_tells_a_poor_start() -> None:
    tab = TABS["deconvolution"]
    good = deconvolution.compute(deconvolution.Settings(**tab.read({})))  # type: ignore[arg-type]
    poor = deconvolution.compute(
        deconvolution.Settings(**{**tab.read({}), "start": "three, poorly placed"})  # type: ignore[arg-type]
    )
    assert good.certificate.gap < 1e-3
    assert len(good.spikes) == 3
    assert poor.certificate.gap > 0.1
    assert poor.certificate.supremum > 1.1


def test_margins_stay_below_what_is_possible() -> None:
    result = margin.compute(margin.Settings(3, 30, 100, 300, 1))
    assert result.second is not None
    assert 0.5 * result.first.attained < float(result.both.margin[-1]) <= result.first.bound * (1 + 1e-6)
    assert 0.5 * result.second.attained < float(result.output.margin[-1]) <= result.second.bound * (1 + 1e-6)


def test_random_features_that_do_not_separate_are_said_so() -> None:
    result = margin.compute(margin.Settings(4, 60, 20, 50, 2))
    assert result.second is None
    assert any("do not separate" in number.meaning for number in margin.scene(result).numbers)


def test_regions_cover_where_f_is_positive() -> None:
    first, second = np.meshgrid(margin.SIGHT, margin.SIGHT, indexing="xy")
    disc = 0.4**2 - first**2 - second**2  # a disc, whose hole is cut out below
    rings = margin.positive(np.where(first**2 + second**2 < 0.15**2, -1.0, disc))
    assert len(rings) == 2
    areas = sorted(abs(0.5 * np.sum(r[:, 0] * np.roll(r[:, 1], -1) - r[:, 1] * np.roll(r[:, 0], -1))) for r in rings)
    assert areas[1] == pytest.approx(math.pi * 0.4**2, rel=0.01)
    assert areas[0] == pytest.approx(math.pi * 0.15**2, rel=0.2)
    assert margin.positive(-np.ones_like(first)) == []


def test_the_trained_net_ends_below_its_rivals() -> None:
    curves = risks.compute(risks.Settings("quadratic form", "exponential", "I", 40, 0)).curves
    own = [n for n in hidden_widths(40) if n < 40]
    here = len(own)
    fixed = curves.features[[n - 1 for n in own]]
    assert bool((fixed > curves.tangent[:here]).all())
    assert bool((curves.tangent[:here] > curves.network[-1, :here]).all())


def test_the_alpha_dial_ends_at_the_tangent_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alpha, "STEPS", 300)
    result = alpha.compute(alpha.Settings(30.0, 20, 15, 9))
    assert result.sweep[list(alpha.ALPHAS).index(30.0)] == pytest.approx(float(result.lesson.test[-1, 0]), rel=1e-6)
    assert result.sweep[-1] == pytest.approx(float(result.lesson.test[-1, 1]), rel=1e-6)
    assert float(result.sweep[0]) < 0.5 * float(result.sweep[-1]), "features generalise better"
    assert float(result.lesson.displacement[-1]) < 0.01


def test_the_diagonal_tab_moves_from_one_norm_to_the_other() -> None:
    rich, lazy = (diagonal.compute(diagonal.Settings(scale, 2, 16, 3, 40, 0)) for scale in (1e-6, 100.0))
    for result in (rich, lazy):
        assert float(result.apart[-1]) < 1e-6, "the flow ends where the formula says"
    assert float((rich.beta[-1] - rich.sparsest).norm()) < 0.05
    assert float((lazy.beta[-1] - lazy.smallest).norm()) < 1e-3
    assert float(lazy.drift[-1]) < 1e-3 < float(rich.drift[-1])


def test_grokking_is_late_for_larger_scales_and_never_for_the_tangent_model() -> None:
    delays = []
    for scale in (0.002, 0.01, math.inf):
        result = grokking.compute(grokking.Settings(scale, 9, 80, 800, 0))
        ends = [grokking.first(result, curve, level) for curve, level in ((result.test, 0.5), (result.train, 0.95))]
        assert math.isfinite(ends[1])
        delays.append(ends[0] / ends[1])
    assert 1 <= delays[0] < 2 < delays[1] < delays[2] == math.inf
