"""Counts, times and sizes as people write them: ``2B``, ``3h30m``, ``1.5 GiB``."""

from __future__ import annotations

import re

_COUNT_SUFFIX = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_TIME_SUFFIX_S = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
_TIME_PART = re.compile(r"(\d+(?:\.\d+)?)([dhms])")


def parse_count(text: str | float) -> int:
    """``2B``, ``500M``, ``1_000``, ``2e9`` → a whole number; ``ValueError`` for anything else, booleans included."""
    if isinstance(text, bool):
        raise ValueError(f"expected a count such as 500M, got {text}")
    if isinstance(text, int | float):
        value = float(text)
    else:
        match = re.fullmatch(r"([0-9][0-9_]*(?:\.[0-9]+)?(?:e[+]?[0-9]+)?)\s*([kmbt]?)", text.strip().lower())
        if match is None:
            raise ValueError(f"expected a count such as 500M, 2B or 100_000, got {text!r}")
        value = float(match[1].replace("_", "")) * _COUNT_SUFFIX[match[2]]
    if value != int(value):
        raise ValueError(f"expected a whole number, got {text!r}")
    return int(value)


def parse_time_s(text: str | float) -> float:
    """``3h30m``, ``45s``, ``2d`` or a number of seconds → seconds."""
    if isinstance(text, bool):
        raise ValueError(f"expected a time such as 3h30m, got {text}")
    if isinstance(text, int | float):
        return float(text)
    stripped = text.strip().lower().replace(" ", "")
    parts = _TIME_PART.findall(stripped)
    if not parts or "".join(number + unit for number, unit in parts) != stripped:
        raise ValueError(f"expected a time such as 3h30m or 90s, got {text!r}")
    return sum(float(number) * _TIME_SUFFIX_S[unit] for number, unit in parts)


def format_count(value: float) -> str:
    """1_234_567 → ``1.23M``."""
    for suffix, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:.3g}{suffix}"
    return f"{value:.3g}"


def format_time(seconds: float) -> str:
    """3_725 → ``1h 2m``."""
    if seconds < 60:
        return f"{seconds:.0f}s"
    minutes, rest_s = divmod(round(seconds), 60)
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
        if abs(size) < 1024:
            return f"{size:.0f} {suffix}" if suffix == "B" else f"{size:.1f} {suffix}"
        size /= 1024
    return f"{size:.1f} TiB"
