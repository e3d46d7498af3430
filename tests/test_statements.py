"""The page of statements: every carrier exists and names its statement, and every experiment is on the page."""

from __future__ import annotations

import importlib
import inspect
import re
from functools import cache
from pathlib import Path

import pytest
from docs import statements

from lazyscope.experiments import experiments

ROOT = Path(__file__).parent.parent
ROWS = [row for rows in statements.STATEMENTS.values() for row in rows]


@cache
def text(carrier: str) -> str:
    """Return the code of an experiment, or the source of the module that defines a function."""
    if carrier in experiments():
        return inspect.getsource(importlib.import_module(f"lazyscope.experiments.{carrier.replace('-', '_')}"))
    module, _, name = carrier.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    return inspect.getsource(importlib.import_module(found.__module__))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.label)
def test_a_carrier_names_its_statement(row: statements.Statement) -> None:
    assert row.carriers
    assert any(row.cited.lower() in text(carrier).lower() for carrier in row.carriers), row


NUMBERED = {
    statements.PAPER: (
        *("Equation (1)", "Equation (2)", "Equation (3)", "Equation (4)", "Equation (5)", "Assumption 2.1"),
        *("Theorem 2.2", "Theorem 2.3", "Theorem 2.4", "Theorem 2.5"),
        *("Figure 1(a,b)", "Figure 1(c)", "Figure 2(a)", "Figure 2(b)", "Figure 3(a)", "Figure 3(b)"),
    ),
    statements.SUPPLEMENT: (
        *("Eq. (8)", "Proposition A.1", "Lemma B.1", "Lemma B.2"),
        *("Figure 4", "Figure 5", "Figure 6", "Figure 7(a)", "Figure 7(b)"),
    ),
    statements.LECTURE: ("Figure 2", "Figure 3", "Definition", "Theorem", "Proposition"),
    statements.POSTER: ("Theorem 1", "Theorem 2", "Theorem 3", "Figure 1", "Figure 2", "Figure 3"),
    statements.TALK: (
        *("Theorem, mean-field", "Theorem, global convergence", "Corollary, global convergence"),
        *("Theorem, sharpness", "Corollary, sharpness", "Theorem, quantitative", "Lemma, mirror descent rate"),
        *("Theorem (Soudry", "Theorem, implicit bias", "Theorem (Non-asymptotic)", "Theorem (Strongly convex)"),
        "Figure 5",
    ),
}
"""The numbered statements of the sources, read from them; unnumbered theorems by their titles."""


@pytest.mark.parametrize("source", NUMBERED)
def test_every_numbered_statement_of_a_source_is_on_the_page(source: str) -> None:
    labels = [row.label.lower() for row in statements.STATEMENTS[source]]
    assert [name for name in NUMBERED[source] if not any(name.lower() in label for label in labels)] == []


def test_every_experiment_is_on_the_page() -> None:
    assert set(experiments()) - {carrier for row in ROWS for carrier in row.carriers} == set()


def test_every_numbered_theorem_that_the_code_cites_is_on_the_page() -> None:
    """Theorems, propositions and lemmas that an experiment or a certificate names have a row."""
    labels = " ".join(row.label for row in ROWS)
    folders = ("experiments", "theory", "certify")
    files = [path for name in folders for path in (ROOT / "src/lazyscope" / name).glob("*.py")]
    cited = {
        " ".join(pair)
        for path in files
        for pair in re.findall(r"\b(Theorem|Lemma|Proposition) ([AB]?\.?\d(?:\.\d)?)", path.read_text(encoding="utf-8"))
    }
    assert cited
    assert {name for name in cited if name not in labels} == set()


def test_the_page_has_a_row_for_each_statement() -> None:
    page = statements.on_page_markdown((ROOT / "docs/statements.md").read_text(encoding="utf-8"))
    assert page.count("\n| ") == len(ROWS) + len(statements.STATEMENTS)
    assert statements.MARK not in page


def test_the_errata_name_figures_and_functions_that_exist() -> None:
    page = (ROOT / "docs/errata.md").read_text(encoding="utf-8")
    figures = set(re.findall(r"figure `([a-z-]+)`", page))
    assert figures
    assert figures <= set(experiments())
    for name in set(re.findall(r"`(theory\.[a-z_.]+)`", page)):
        module, _, function = f"lazyscope.{name}".rpartition(".")
        assert callable(getattr(importlib.import_module(module), function))
