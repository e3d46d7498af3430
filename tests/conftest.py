"""Configuration: every test checks shapes and types at run time, and uses one torch thread.

Tests marked `slow` run in `make slow`. Tests marked `hours` run with LAZYSCOPE_SLOW=1 only, as do all of them then.
"""

from __future__ import annotations

import os

import hypothesis
import pytest
from jaxtyping import install_import_hook

# This must run before any test imports lazyscope, as modules imported earlier would not be checked.
hook = install_import_hook("lazyscope", "beartype.beartype")

import torch  # noqa: E402

torch.set_num_threads(1)  # test processes share the cores

# A deadline would measure the machine, which may be busy.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    everything, asked = os.environ.get("LAZYSCOPE_SLOW") == "1", "slow" in config.option.markexpr
    for item in items:
        if item.get_closest_marker("hours") and not everything:
            item.add_marker(pytest.mark.skip(reason="takes hours; set LAZYSCOPE_SLOW=1"))
        elif item.get_closest_marker("slow") and not everything and not asked:
            item.add_marker(pytest.mark.skip(reason="slow; run `make slow`"))
