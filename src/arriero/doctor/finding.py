"""One finding of the doctor, and whether all is well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """One finding. ``ok`` False with ``required`` False is something to know, not something in the way."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""
    required: bool = True


def all_ok(checks: Sequence[Check]) -> bool:
    """Whether no required check failed."""
    return all(check.ok or not check.required for check in checks)
