"""Any part of a parameter is read from whatever slices hold it: ranges of the flat form, or of some columns."""

from __future__ import annotations

import itertools
from pathlib import Path

import orjson
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from arriero.checkpoint.layout import FORMAT_VERSION
from arriero.checkpoint.saved import SavedState
from arriero.errors import UserError


def cuts(total: int, draw: st.DrawFn) -> list[int]:
    return sorted({0, total, *draw(st.lists(st.integers(0, total), max_size=4))})


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, int, list[tuple[int, int, tuple[int, int] | None]]]:
    """(rows, columns, slices that together hold a matrix once): columns over ranks, then each flat range over ranks."""
    rows, width = draw(st.integers(1, 7)), draw(st.integers(1, 7))
    slices: list[tuple[int, int, tuple[int, int] | None]] = []
    across = cuts(width, draw)
    for left, right in itertools.pairwise(across):
        edges = cuts(rows * (right - left), draw)
        columns = None if (left, right) == (0, width) else (left, right)
        slices += [(start, stop, columns) for start, stop in itertools.pairwise(edges)]
    return rows, width, slices


def flat_part(whole: torch.Tensor, columns: tuple[int, int] | None) -> torch.Tensor:
    return (whole if columns is None else whole[:, slice(*columns)]).flatten()


def write(folder: Path, whole: torch.Tensor, slices: list[tuple[int, int, tuple[int, int] | None]]) -> SavedState:
    entries = []
    for number, (start, stop, columns) in enumerate(slices):
        file = f"state-{number:05}.safetensors"
        save_file({"w/master": flat_part(whole, columns)[start:stop].clone()}, folder / file)
        entries.append({"file": file, "start": start, "stop": stop} | ({"columns": columns} if columns else {}))
    manifest = {"format_version": FORMAT_VERSION, "parameters": {"w": {"shape": list(whole.shape), "slices": entries}}}
    (folder / "manifest.json").write_bytes(orjson.dumps(manifest))
    return SavedState(folder)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(layouts(), st.data())
def test_any_part_from_any_slices(tmp_path_factory: pytest.TempPathFactory, layout: tuple, data: st.DataObject) -> None:
    rows, width, slices = layout
    whole = torch.arange(rows * width, dtype=torch.float32).view(rows, width)
    with write(tmp_path_factory.mktemp("checkpoint"), whole, slices) as saved:
        assert torch.equal(saved.read("w"), whole)
        left = data.draw(st.integers(0, width - 1))
        columns = data.draw(st.sampled_from([None, (left, data.draw(st.integers(left + 1, width)))]))
        expected = flat_part(whole, columns)
        start = data.draw(st.integers(0, len(expected) - 1))
        stop = data.draw(st.integers(start + 1, len(expected)))
        # Into a view of a larger buffer, as ZeRO's flat ones are.
        buffer = torch.full((len(expected) + 5,), -1.0)
        saved.read_into(buffer[3 : 3 + stop - start], "w", "master", start, columns)
    assert torch.equal(buffer[3 : 3 + stop - start], expected[start:stop])
    assert (buffer[:3] == -1).all()
    assert (buffer[3 + stop - start :] == -1).all()


def test_what_is_missing_is_counted(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(3, 4)
    with (
        write(tmp_path, whole, [(0, 6, (0, 2)), (2, 6, (2, 4))]) as saved,
        pytest.raises(UserError, match="lacks 2 of"),
    ):
        saved.read("w")
