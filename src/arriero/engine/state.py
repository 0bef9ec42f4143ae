"""What goes into an engine and what it holds: micro-batches, and the training state as slices of whole parameters."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank: int64 tensors ``[m, L]`` on the rank's device."""

    input_ids: Tensor
    targets: Tensor
    position_ids: Tensor


@dataclass(frozen=True)
class Region:
    """The part of a parameter that one rank's weight is: all of it, some of its rows, or some of its columns."""

    shape: tuple[int, ...]
    """Of the whole parameter."""
    start: int
    """First element in the flat form of the whole parameter, or of its ``columns``."""
    columns: tuple[int, int] | None
    """The columns ``[first, last)`` of a matrix; None: whole rows."""
    counted: bool
    """False where another rank of the replica holds the same."""


def whole(shape: tuple[int, ...], *, counted: bool = True) -> Region:
    """All of a parameter."""
    return Region(shape, 0, None, counted)


@dataclass(frozen=True)
class StateSlice:
    """The part of one parameter's training state that this rank holds: elements ``[start, start + n)`` of the flat form
    of the parameter, or of its ``columns``.

    Views of the live state, fp32 ``[n]``: writing into them writes the state.
    """

    parameter: str
    shape: tuple[int, ...]
    start: int
    columns: tuple[int, int] | None
    counted: bool
    """Whether this rank saves it: of ranks that hold the same, one does."""
    master: Tensor
    moments: dict[str, Tensor]


def put_part(whole_parameter: Tensor, start: int, columns: tuple[int, int] | None, values: Tensor) -> None:
    """Write ``values``, ``[n]``, as elements ``[start, start + n)`` of the flat parameter, or of its columns."""
    part = whole_parameter if columns is None else whole_parameter[:, slice(*columns)]
    flat = part.flatten()
    flat[start : start + len(values)] = values
    part.copy_(flat.view(part.shape))
