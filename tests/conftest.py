"""Every test runs with shapes and types checked, on one torch thread."""

from __future__ import annotations

from jaxtyping import install_import_hook

# Before any test imports lazyscope: modules imported earlier would go unchecked.
hook = install_import_hook("lazyscope", "beartype.beartype")

import torch  # noqa: E402

torch.set_num_threads(1)  # the test processes share the cores
