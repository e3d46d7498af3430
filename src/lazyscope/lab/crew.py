"""The workers behind a Dask client: which of them can be trusted with a trial, and what they compute on."""

from __future__ import annotations

import pkgutil
import warnings
from typing import TYPE_CHECKING

import torch

from lazyscope.errors import LazyscopeError

if TYPE_CHECKING:  # it takes a second to import, and comes with an extra
    import distributed

PATIENCE = 30.0
"""Seconds to wait for a scheduler to answer, or to come back."""

_VERSION = "lazyscope:__version__"


class ClusterNote(UserWarning):
    """Something happened to a cluster that the run survives."""


class Crew:
    """All workers of one scheduler; each is asked for its version before it gets work, and whenever one joins."""

    def __init__(self, client: distributed.Client) -> None:
        self.client = client
        self.address = str(client.scheduler_info()["address"])
        self._complaints: dict[str, str] = {}

    def able(self) -> list[str]:
        """The addresses of all workers that have this very lazyscope; of each other one it is said once why not."""
        threads: dict[str, int] = self.client.nthreads()
        unknown = [address for address in threads if address not in self._complaints]
        # A function of the standard library: a worker without lazyscope could not load one of ours.
        answers = self.client.run(pkgutil.resolve_name, _VERSION, workers=unknown, on_error="return") if unknown else {}
        for address, answer in answers.items():
            if not isinstance(answer, OSError):  # that one has gone meanwhile
                self._judge(address, answer, threads[address])
        able = [address for address in threads if self._complaints.get(address, "gone") == ""]
        if threads and not able:
            raise LazyscopeError(next((text for text in self._complaints.values() if text), "All workers have gone."))
        return able

    def refuse(self, address: str, complaint: str) -> None:
        """Give this worker no more work."""
        if not self._complaints.get(address):
            self._complaints[address] = complaint
            warnings.warn(f"{complaint} The others go on without it.", ClusterNote, stacklevel=2)

    @property
    def mixed(self) -> bool:
        """Whether there are workers that must not be given work."""
        return any(self._complaints.values())

    def device(self, name: str) -> torch.device:
        """`auto` takes GPUs where all workers have them; asking for some that are not there is an error."""
        if name == "cpu":
            return torch.device("cpu")
        seen: dict[str, bool] = self.client.run(torch.cuda.is_available, workers=self.able())
        without = [address for address, there in seen.items() if not there]
        if not without:
            return torch.device("cuda")
        if name == "auto" and len(without) == len(seen):
            return torch.device("cpu")
        raise LazyscopeError(f"Worker {without[0]} sees no CUDA device; close it, or use --device cpu.")

    def _judge(self, address: str, version: object, threads: int) -> None:
        ours = pkgutil.resolve_name(_VERSION)
        self._complaints[address] = ""
        if isinstance(version, Exception):
            self.refuse(
                address,
                f"Worker {address} cannot load lazyscope ({version}); install lazyscope {ours} for its Python and"
                " restart it.",
            )
        elif version != ours:
            self.refuse(
                address,
                f"Worker {address} has lazyscope {version}, and this client {ours}; install the same and restart it.",
            )
        elif threads > 1:
            warnings.warn(
                f"Worker {address} has {threads} threads, but runs one trial at a time; start it with --nthreads 1.",
                ClusterNote,
                stacklevel=2,
            )
