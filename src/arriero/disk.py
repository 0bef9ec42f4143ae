"""What a file is, and that it stays."""

from __future__ import annotations

import os
from pathlib import Path

import xxhash

_CHUNK = 1 << 22


def hash_file(path: Path) -> str:
    """xxh3-128 of the content, hexadecimal."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def sync_folder(path: Path) -> None:
    """Make names that were created or renamed in a folder survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
