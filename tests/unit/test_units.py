from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arriero.units import format_bytes, format_count, format_time, parse_bytes, parse_count, parse_time_s


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("2B", 2_000_000_000),
        ("500M", 500_000_000),
        ("1.5k", 1_500),
        ("3T", 3_000_000_000_000),
        (" 7 m ", 7_000_000),
        ("1_000", 1_000),
        ("2e9", 2_000_000_000),
        ("0.000000001B", 1),
        (12, 12),
        (-3, -3),
        (2e6, 2_000_000),
        # More than a float's 53 bits: a seed must not be another seed.
        (2**53 + 1, 2**53 + 1),
        ("9_007_199_254_740_993", 2**53 + 1),
    ],
)
def test_counts(text: object, count: int) -> None:
    assert parse_count(text) == count
    assert type(parse_count(text)) is int


@pytest.mark.parametrize(
    "text",
    [True, None, [1], {}, "", "yes", "-5", "1.5", 1.5, "2X", "2 B B", "k", "1e-3", "0x10", "1e400", math.inf, math.nan],
)
def test_what_is_no_count_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="expected a"):
        parse_count(text)


@given(st.integers(0, 10**30))
def test_counts_are_exact(number: int) -> None:
    assert parse_count(str(number)) == parse_count(f"{number:_}") == parse_count(number) == number


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("3h30m", 12_600), ("45s", 45), ("2d", 172_800), ("1 h 5 s", 3_605), ("0.5h", 1_800), (90, 90), (1.5, 1.5)],
)
def test_times(text: object, seconds: float) -> None:
    assert parse_time_s(text) == seconds


@pytest.mark.parametrize("text", [True, None, [1], "", "12:00:00", "3", "h", "3h30", "3x", "-3h"])
def test_what_is_no_time_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="expected a time"):
        parse_time_s(text)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (7, "7"),
        (999, "999"),
        (1_234_567, "1.23M"),
        (999_999, "1M"),
        (999.6, "1k"),
        (3.2e12, "3.2T"),
        (4.5e15, "4500T"),
        (-2_000, "-2k"),
        (0.25, "0.25"),
    ],
)
def test_format_count(value: float, text: str) -> None:
    assert format_count(value) == text


@given(st.integers(1, 10**15))
def test_a_formatted_count_is_near_and_plain(number: int) -> None:
    text = format_count(number)
    assert "e" not in text
    assert parse_count(text) == pytest.approx(number, rel=5e-3)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.4, "59s"), (59.6, "1m 00s"), (119, "1m 59s"), (3_725, "1h 02m"), (90_000, "1d 1h")],
)
def test_format_time(seconds: float, text: str) -> None:
    assert format_time(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (3 * 2**30, "3.0 GiB"),
        (5 * 2**50, "5120.0 TiB"),
    ],
)
def test_format_bytes(size: float, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("500 MiB", 500 * 2**20), ("1.5kb", 1500), ("200", 200), ("7b", 7), ("2TiB", 2**41)],
)
def test_sizes_as_hugging_face_reads_them(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "0GB", "five GB", "5 GBit", "-1MB", "5G", "GB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="such as 5GB"):
        parse_bytes(text)
