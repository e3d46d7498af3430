"""Find the user who owns a loopback connection, from `/proc/net` on Linux."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

TABLES = {socket.AF_INET: Path("/proc/net/tcp"), socket.AF_INET6: Path("/proc/net/tcp6")}
"""The tables of all TCP sockets of this machine, with their addresses, state and owner."""

_ESTABLISHED = "01"


def ours(client: tuple[str, int], server: tuple[str, int]) -> bool:
    """Decide whether a loopback connection was opened by the user of this process or by root.

    A connection that its owner has closed is listed with root as owner and without an inode; it is not accepted. On
    systems that do not report the owner of a connection, every local user is accepted.

    Args:
        client: The address and port of the client.
        server: The address and port of this process.

    Returns:
        Whether to accept the connection.
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
    """Format an address as in the table, with each word of four bytes in the byte order of the machine."""
    packed = socket.inet_pton(family, host.partition("%")[0])
    words = [int.from_bytes(packed[i : i + 4], sys.byteorder) for i in range(0, len(packed), 4)]
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"
