"""Small steps run on one thread, and the number of threads comes back."""

from __future__ import annotations

import pytest
import torch

from lazyscope.linalg.threads import SMALL, threads_for


def test_threads_come_back_also_after_an_error() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with threads_for(SMALL - 1):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        with threads_for(SMALL):
            assert torch.get_num_threads() == 2
        with pytest.raises(ValueError, match="no"), threads_for(0):
            raise ValueError("no")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
