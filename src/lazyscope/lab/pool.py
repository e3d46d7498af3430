"""The workers of a Dask client: which of them have a matching version of lazyscope, and which devices they have."""

from __future__ import annotations

import pkgutil
import warnings
from typing import TYPE_CHECKING

import torch

from lazyscope.errors import LazyscopeError

if TYPE_CHECKING:  # it takes a second to import, and belongs to an extra
    import distributed

PATIENCE = 30.0
"""The number of seconds to wait for a scheduler to answer or to come back."""

_VERSION = "lazyscope:__version__"


class ClusterNote(UserWarning):
    """A warning about an event on a cluster that does not stop the run."""


class WorkerPool:
    """The workers of one scheduler.

    The version of lazyscope on a worker is checked before the worker receives any task, also if it joins later.

    Args:
        client: A client connected to the scheduler.
    """

    def __init__(self, client: distributed.Client) -> None:
        self.client = client
        self.address = str(client.scheduler_info()["address"])
        self._complaints: dict[str, str] = {}

    def able(self) -> list[str]:
        """Find the workers that have the same version of lazyscope as this process.

        For each other worker, a warning explains once why it is not used.

        Returns:
            The addresses of the workers.

        Raises:
            LazyscopeError: If there are workers, but none can be used.
        """
        threads: dict[str, int] = self.client.nthreads()
        unknown = [address for address in threads if address not in self._complaints]
        # A function of the standard library, because a worker without lazyscope could not load one of ours.
        answers = self.client.run(pkgutil.resolve_name, _VERSION, workers=unknown, on_error="return") if unknown else {}
        for address, answer in answers.items():
            if not isinstance(answer, OSError):  # that worker has disconnected in the meantime
                self._judge(address, answer, threads[address])
        able = [address for address in threads if self._complaints.get(address, "gone") == ""]
        if threads and not able:
            raise LazyscopeError(next((text for text in self._complaints.values() if text), "All workers have left."))
        return able

    def refuse(self, address: str, complaint: str) -> None:
        """Give no more tasks to a worker, and warn about it.

        Args:
            address: The address of the worker.
            complaint: The reason, as a sentence.
        """
        if not self._complaints.get(address):
            self._complaints[address] = complaint
            warnings.warn(f"{complaint} The other workers continue without it.", ClusterNote, stacklevel=2)

    @property
    def mixed(self) -> bool:
        """Whether some workers must not receive tasks."""
        return any(self._complaints.values())

    def device(self, name: str) -> torch.device:
        """Choose the device type that the workers use.

        Args:
            name: "cpu", "cuda", or "auto", which selects CUDA if all workers have it and the CPU if none does.

        Returns:
            The device.

        Raises:
            LazyscopeError: If some workers lack the requested device.
        """
        if name == "cpu":
            return torch.device("cpu")
        seen: dict[str, bool] = self.client.run(torch.cuda.is_available, workers=self.able())
        without = [address for address, there in seen.items() if not there]
        if not without:
            return torch.device("cuda")
        if name == "auto" and len(without) == len(seen):
            return torch.device("cpu")
        raise LazyscopeError(f"Worker {without[0]} has no CUDA device; stop this worker, or use --device cpu.")

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
                f"Worker {address} has lazyscope {version}, but the client has {ours}; install the same version and"
                " restart it.",
            )
        elif threads > 1:
            warnings.warn(
                f"Worker {address} has {threads} threads, but runs one trial at a time; start it with --nthreads 1.",
                ClusterNote,
                stacklevel=2,
            )
