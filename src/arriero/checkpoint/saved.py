"""The state in a checkpoint, by name: tensors, random generators and JSON. No DeepSpeed, no GPU, no other rank."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
import orjson
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from arriero.checkpoint.layout import read_manifest
from arriero.errors import UserError


@dataclass(frozen=True)
class _Band:
    """A rectangle of a matrix: rows ``[top, bottom)`` and columns ``[left, right)``."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def rows(self) -> int:
        return self.bottom - self.top

    @property
    def columns(self) -> int:
        return self.right - self.left


@dataclass(frozen=True)
class _Extent:
    """Elements ``[start, stop)`` of the flat form of a matrix's columns ``[left, right)``: a rectangle whose first and
    last rows may be cut. A vector is one row."""

    start: int
    stop: int
    left: int
    right: int

    @property
    def width(self) -> int:
        return self.right - self.left

    def in_row(self, row: int) -> tuple[int, int]:
        """The columns of one row that belong to it."""
        first, last = self.start - row * self.width, self.stop - row * self.width
        return self.left + max(first, 0), self.left + min(last, self.width)

    def edges(self) -> set[int]:
        """Rows at which ``in_row`` may change."""
        first, last = self.start // self.width, (self.stop - 1) // self.width
        return {first, first + 1, last, last + 1}

    def shared_with(self, other: _Extent) -> Iterator[_Band]:
        """What both hold, as at most seven rectangles."""
        edges = sorted(self.edges() | other.edges())
        for top, bottom in pairwise(edges):
            (left, right), (others_left, others_right) = self.in_row(top), other.in_row(top)
            band = _Band(top, bottom, max(left, others_left), min(right, others_right))
            if band.columns > 0:
                yield band

    def block(self, flat: Tensor, band: _Band) -> Tensor:
        """The rectangle in this extent's own flat tensor, as a view ``[rows, columns]``."""
        first = band.top * self.width + band.left - self.left - self.start
        return flat.as_strided((band.rows, band.columns), (self.width, 1), flat.storage_offset() + first)

    def read(self, stored: Any, band: _Band) -> Tensor:
        """The rectangle from this extent's slice of a safetensors file; no more than its rows is read."""
        begin = max(band.top * self.width - self.start, 0)
        end = min(band.bottom * self.width, self.stop) - self.start
        rows: Tensor = stored[begin:end]
        return _Extent(self.start + begin, self.start + end, self.left, self.right).block(rows, band)


class SavedState:
    """The state in a checkpoint by parameter name; reads any range of a parameter from whatever slices hold it."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.parameters: dict[str, Any] = read_manifest(checkpoint)["parameters"]
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self._stack.close()

    def expect(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """``UserError`` unless every parameter is there in that shape."""
        for name, shape in shapes.items():
            saved = self.parameters.get(name)
            if saved is None or tuple(saved["shape"]) != shape:
                found = "is not in it" if saved is None else f"has the shape {tuple(saved['shape'])} in it"
                raise UserError(f"{self.checkpoint}: {name}, {shape} in this model, {found}")

    def read(self, name: str, kind: str = "master") -> Tensor:
        """A whole tensor, fp32, in its own shape. kind: master, exp_avg, exp_avg_sq, or Muon's momentum_buffer."""
        shape = self.parameters[name]["shape"]
        whole = torch.empty(int(np.prod(shape)), dtype=torch.float32)
        self.read_into(whole, name, kind, 0)
        return whole.view(shape)

    def read_into(
        self, target: Tensor, name: str, kind: str, start: int, columns: tuple[int, int] | None = None
    ) -> None:
        """Fill ``target``, fp32 ``[n]``, with elements ``[start, start + n)`` of the flat parameter, or of its columns."""
        entry = self.parameters[name]
        width = int(entry["shape"][-1]) if entry["shape"] else 1
        wanted = _Extent(start, start + target.numel(), *(columns or (0, width)))
        filled = 0
        for piece in entry["slices"]:
            held = _Extent(piece["start"], piece["stop"], *piece.get("columns", (0, width)))
            tensor = None
            for band in wanted.shared_with(held):
                tensor = tensor or self._slice(piece["file"], name, kind)
                wanted.block(target, band).copy_(held.read(tensor, band))
                filled += band.rows * band.columns
        if filled != target.numel():
            raise UserError(f"{self.checkpoint}: {name} lacks {target.numel() - filled} of its elements")

    def _slice(self, file: str, name: str, kind: str) -> Any:
        try:
            return self._file(file).get_slice(f"{name}/{kind}")
        except SafetensorError:
            raise UserError(
                f"{self.checkpoint}: {name} has no {kind} in it: it was trained by another optimizer",
                "Continue with the optim.optimizer that it was saved with.",
            ) from None

    def _file(self, name: str) -> Any:
        if name not in self._files:
            self._files[name] = self._stack.enter_context(safe_open(self.checkpoint / name, framework="pt"))
        return self._files[name]


def read_json(checkpoint: Path, name: str) -> dict[str, Any]:
    """One of the checkpoint's JSON files."""
    return dict(orjson.loads((checkpoint / name).read_bytes()))


def random_state() -> dict[str, Tensor]:
    """This process's random generators (Python's, NumPy's, torch's and the GPU's) as tensors: nothing is pickled."""
    numpy_state = np.random.get_state(legacy=False)
    version, internal, gauss_next = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "numpy_words": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
        "numpy_rest": torch.tensor(
            [float(numpy_state["state"]["pos"]), float(numpy_state["has_gauss"]), numpy_state["gauss"]],
            dtype=torch.float64,
        ),
        "python_words": torch.tensor([version, *internal], dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss_next is None else [gauss_next], dtype=torch.float64),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Tensor]) -> None:
    """Put back what ``random_state`` gave."""
    torch.set_rng_state(state["torch"])
    position, has_gauss, gauss = state["numpy_rest"].tolist()
    words = state["numpy_words"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", words, int(position), int(has_gauss), gauss))
    version, *internal = state["python_words"].tolist()
    gauss_next = state["python_gauss"].tolist()
    random.setstate((version, tuple(internal), gauss_next[0] if gauss_next else None))
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
