"""Which user of this machine is at the other end of a loopback connection; Linux says it in `/proc/net`."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

TABLES = {socket.AF_INET: Path("/proc/net/tcp"), socket.AF_INET6: Path("/proc/net/tcp6")}
"""Every TCP socket of this machine: its two ends, its state, its owner."""

_ESTABLISHED = "01"


def ours(client: tuple[str, int], server: tuple[str, int]) -> bool:
    """Whether a loopback connection was opened by the user of this process, or by the administrator.

    A connection that its owner has closed is listed as the administrator's and without an inode, and is not accepted.
    Where the system does not tell the owner of a connection, every local user is accepted.

    Args:
        client: Address and port of the end that connected.
        server: Address and port of the end in this process.

    Returns:
        Whether to answer.
    """
    family = socket.AF_INET6 if ":" in server[0] else socket.AF_INET
    if not TABLES[family].exists():
        return True
    ends = [_spelled(family, *client), _spelled(family, *server)]
    for line in TABLES[family].read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1:3] == ends:
            return fields[3] == _ESTABLISHED and fields[9] != "0" and int(fields[7]) in (0, os.getuid())
    return False


def _spelled(family: socket.AddressFamily, host: str, port: int) -> str:
    """An end as the table spells it: each word of four bytes in the machine's own order."""
    packed = socket.inet_pton(family, host.partition("%")[0])
    words = [int.from_bytes(packed[i : i + 4], sys.byteorder) for i in range(0, len(packed), 4)]
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"
