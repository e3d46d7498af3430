"""Checksums, which detect files that were changed after they were written."""

from __future__ import annotations

import hashlib
import json
from typing import Any

_END = b"PK\5\6"
"""The start of the last record of a ZIP archive, 22 bytes before its end if the archive has no comment."""

_MARK = b"sha256:"


def sealed(archive: bytes) -> bytes:
    """Add the SHA-256 of a ZIP archive to it as a comment. The result is still a valid ZIP archive.

    Args:
        archive: The archive, without a comment.

    Returns:
        The archive with the comment.

    Raises:
        ValueError: If it is not a ZIP archive, or already has a comment.
    """
    if archive[-22:-18] != _END:
        raise ValueError("not a ZIP archive without a comment")
    covered = archive[:-2] + (len(_MARK) + 64).to_bytes(2, "little") + _MARK
    return covered + hashlib.sha256(covered).hexdigest().encode()


def seal_of(content: bytes) -> str:
    """Verify the checksum of an archive that `sealed` returned.

    Args:
        content: The content of the file.

    Returns:
        The checksum, in hexadecimal digits.

    Raises:
        ValueError: If there is no checksum, or it does not match the content.
    """
    covered, found = content[:-64], content[-64:]
    if not covered.endswith(_MARK):
        raise ValueError("it has no checksum, or is truncated")
    if hashlib.sha256(covered).hexdigest().encode() != found:
        raise ValueError("its checksum does not match")
    return found.decode()


def checksum(table: Any, *files: bytes) -> str:
    """Compute the SHA-256 of a table and of the files that belong to it.

    Args:
        table: Any JSON-serialisable object. The order of its keys does not matter.
        files: The contents of the files.

    Returns:
        The checksum, in hexadecimal digits.
    """
    digest = hashlib.sha256(json.dumps(table, sort_keys=True).encode())
    for file in files:
        digest.update(hashlib.sha256(file).digest())
    return digest.hexdigest()
