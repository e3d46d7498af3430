"""Each cell of the table is exact or refused, as the table states."""

from __future__ import annotations

import os
import re
from functools import lru_cache

import pytest
from tests.conformance.entries import ENTRIES, Trial, quiet
from tests.conformance.table import SITUATIONS, TABLE, Row, Situation

from lazyscope.errors import LazyscopeError

SLOW = os.environ.get("LAZYSCOPE_SLOW") == "1"
ROWS = {row.name: row for row in TABLE}


@lru_cache(maxsize=2)  # the cells of a row are consecutive, so each model is traced once
def trial(name: str) -> Trial:
    row = ROWS[name]
    return Trial(row.make, row.tolerance)


def cells() -> list[object]:
    return [
        pytest.param(row, entry, id=f"{row.name}-{entry}", marks=pytest.mark.xdist_group(f"conformance {row.name}"))
        for row in TABLE
        for entry in ENTRIES
        if SLOW or entry in row.often
    ]


@pytest.mark.parametrize(("row", "entry"), cells())
def test_cell(row: Row, entry: str) -> None:
    pattern = row.refused.get(entry)
    subject = trial(row.name)
    with quiet():
        if pattern is None:
            enter(subject, entry)
            return
        with pytest.raises(LazyscopeError) as refusal:
            enter(subject, entry)
    assert re.search(pattern, str(refusal.value)), f"{refusal.value!r} does not match {pattern!r}"
    check_sentence(str(refusal.value))


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda situation: situation.name)
def test_situation(situation: Situation) -> None:
    with quiet():
        if situation.refused is None:
            situation.happen()
            return
        with pytest.raises(LazyscopeError, match=situation.refused) as refusal:
            situation.happen()
    check_sentence(str(refusal.value))


def enter(subject: Trial, entry: str) -> None:
    _ = subject.model  # errors of the constructor are raised before the reference is computed
    ENTRIES[entry](subject)


def check_sentence(message: str) -> None:
    """Check that a message is one line and contains no traceback."""
    assert "\n" not in message
    assert message.endswith(".")
    assert "Traceback" not in message


def test_rows_have_names_of_their_own() -> None:
    assert len(ROWS) == len(TABLE)


def test_refusals_name_entry_points() -> None:
    assert all(set(row.refused) <= set(ENTRIES) for row in TABLE)
