"""The mutants of `tests.mutants` apply to the sources as they are; with LAZYSCOPE_SLOW=1 all of them are run."""

from __future__ import annotations

import pytest
from tests.mutants import MUTANTS, PACKAGE, ROOT, survivors


def test_there_are_forty_mutants_with_names_of_their_own() -> None:
    assert len(MUTANTS) >= 40
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_applies(mutant) -> None:  # type: ignore[no-untyped-def]
    text = (PACKAGE / mutant.file).read_text(encoding="utf-8")
    changed = mutant.applied(text)
    assert changed != text
    compile(changed, mutant.file, "exec")
    for path in mutant.tests.partition(" -k ")[0].split():
        assert (ROOT / path).exists()


def test_a_mutant_whose_text_is_gone_fails_loudly() -> None:
    with pytest.raises(LookupError, match="rewrite the mutant"):
        MUTANTS[0].applied("nothing")


@pytest.mark.hours
@pytest.mark.timeout(7200)
def test_no_mutant_survives() -> None:
    assert [mutant.name for mutant in survivors()] == []
