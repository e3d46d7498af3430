"""Configuration: every test checks shapes and types at run time, and uses one torch thread."""

from __future__ import annotations

from jaxtyping import install_import_hook

# This must run before any test imports lazyscope, as modules imported earlier would not be checked.
hook = install_import_hook("lazyscope", "beartype.beartype")

import torch  # noqa: E402

torch.set_num_threads(1)  # test processes share the cores
