"""Configuration: every test checks shapes and types at run time, and uses one torch thread.

Tests marked `slow` run with LAZYSCOPE_SLOW=1 only (`make slow`). They check what quicker tests check, for more cases.
"""

from __future__ import annotations

import os

import pytest
from jaxtyping import install_import_hook

# This must run before any test imports lazyscope, as modules imported earlier would not be checked.
hook = install_import_hook("lazyscope", "beartype.beartype")

import torch  # noqa: E402

torch.set_num_threads(1)  # test processes share the cores


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("LAZYSCOPE_SLOW") != "1":
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow; set LAZYSCOPE_SLOW=1, or run `make slow`"))
