"""Checksums: a file that was changed after it was written, by one bit or by all, is not taken for what it was."""

from __future__ import annotations

import hashlib
import json
from typing import Any

_END = b"PK\5\6"
"""How the last record of a ZIP archive begins, 22 bytes before its end where the archive has no comment."""

_MARK = b"sha256:"


def sealed(archive: bytes) -> bytes:
    """Give a ZIP archive the SHA-256 of all its bytes for its comment; whatever reads ZIP files reads it as before.

    Args:
        archive: The archive, without a comment.

    Returns:
        The archive with the comment.
    """
    if archive[-22:-18] != _END:
        raise ValueError("not a ZIP archive without a comment")
    covered = archive[:-2] + (len(_MARK) + 64).to_bytes(2, "little") + _MARK
    return covered + hashlib.sha256(covered).hexdigest().encode()


def seal_of(content: bytes) -> str:
    """Check a sealed archive.

    Args:
        content: The whole file.

    Returns:
        Its checksum; a `ValueError` says that the content is not what was sealed.
    """
    covered, found = content[:-64], content[-64:]
    if not covered.endswith(_MARK):
        raise ValueError("it has no checksum, or is cut off")
    if hashlib.sha256(covered).hexdigest().encode() != found:
        raise ValueError("its checksum does not fit")
    return found.decode()


def checksum(table: Any, *files: bytes) -> str:
    """The SHA-256 of a table and of the files that belong to it.

    Args:
        table: Anything that JSON can hold; its layout and the order of its keys do not matter.
        files: The contents of the files.

    Returns:
        Its hexadecimal digits.
    """
    digest = hashlib.sha256(json.dumps(table, sort_keys=True).encode())
    for file in files:
        digest.update(hashlib.sha256(file).digest())
    return digest.hexdigest()
