"""Counts, times and sizes as people write them: ``2B``, ``3h30m``, ``1.5 GiB``."""

from __future__ import annotations

import re
from fractions import Fraction

_COUNT_SUFFIX = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_TIME_SUFFIX_S = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
_SIZE_SUFFIX = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}
_TIME_PART = re.compile(r"(\d+(?:\.\d+)?)([dhms])")


def parse_count(text: object) -> int:
    """``2B``, ``500M``, ``1_000``, ``2e9`` → a whole number, exactly; ``ValueError`` for anything else, booleans too."""
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    if isinstance(text, float):
        if not text.is_integer():  # nor are nan and inf
            raise ValueError(f"expected a whole number, got {text!r}")
        return int(text)
    lower = text.strip().lower() if isinstance(text, str) else ""
    match = re.fullmatch(r"([0-9][0-9_]*(?:\.[0-9]+)?(?:e[+]?[0-9]{1,2})?)\s*([kmbt]?)", lower)
    if match is None:
        raise ValueError(f"expected a count such as 500M, 2B or 100_000, got {text!r}")
    value = Fraction(match[1].replace("_", "")) * _COUNT_SUFFIX[match[2]]
    if value.denominator != 1:
        raise ValueError(f"expected a whole number, got {text!r}")
    return int(value)


def parse_time_s(text: object) -> float:
    """``3h30m``, ``45s``, ``2d`` or a number of seconds → seconds; ``ValueError`` for anything else."""
    if isinstance(text, int | float) and not isinstance(text, bool):
        return float(text)
    stripped = text.strip().lower().replace(" ", "") if isinstance(text, str) else ""
    parts = _TIME_PART.findall(stripped)
    if not parts or "".join(number + unit for number, unit in parts) != stripped:
        raise ValueError(f"expected a time such as 3h30m or 90s, got {text!r}")
    return sum(float(number) * _TIME_SUFFIX_S[unit] for number, unit in parts)


def parse_bytes(text: str) -> int:
    """``5GB``, ``500MiB`` or a plain number of bytes → bytes, as Hugging Face reads them; ``ValueError`` for the rest."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kmgt]i?)b|b)?", text.strip().lower())
    if match is None or not Fraction(match[1]):
        raise ValueError(f"expected a size such as 5GB, 500MB or 2GiB, got {text!r}")
    return int(Fraction(match[1]) * _SIZE_SUFFIX[match[2] or ""])


def format_count(value: float) -> str:
    """1_234_567 → ``1.23M``."""
    rounded = float(f"{value:.3g}")  # first, or 999_999 would be 1e+03k
    for suffix, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(rounded) >= scale:
            return f"{rounded / scale:.10g}{suffix}"
    return f"{rounded:.10g}"


def format_time(seconds: float) -> str:
    """3_725 → ``1h 02m``."""
    minutes, rest_s = divmod(round(seconds), 60)
    if minutes < 1:
        return f"{rest_s}s"
    if minutes < 60:
        return f"{minutes}m {rest_s:02d}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}h {minutes:02d}m"
    days, hours = divmod(hours, 24)
    return f"{days}d {hours}h"


def format_bytes(size: float) -> str:
    """3_221_225_472 → ``3.0 GiB``."""
    for suffix in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < (1024 if suffix == "B" else 1023.95):  # what would round to 1024.0 is the next unit's 1.0
            return f"{size:.0f} {suffix}" if suffix == "B" else f"{size:.1f} {suffix}"
        size /= 1024
    return f"{size:.1f} TiB"
