"""A sampler for any map-style dataset: every row exactly once per epoch over all ranks, and on from where it stood.

The order of an epoch is that of ``arriero.data.order``: a keyed permutation, computed where it is asked for. Rank r of n
takes every n-th row of it, so a place in it, counted in rows over all ranks, means the same for any number of ranks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sized
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.utils.data import Sampler

from arriero.data.order import permute, row_key
from arriero.errors import UserError

_CHUNK = 1 << 12  # rows whose places are computed at once, in 0.2 ms; one by itself takes 0.04 ms


class ExactSampler(Sampler[int]):
    """Indices of a rank's rows, for ``DataLoader(sampler=…)``: over all ranks every row once per epoch, none twice.

    dataset: a map-style dataset, or its number of rows. rank, size: by default those of the process group; before it is
    initialised those of ``RANK`` and ``WORLD_SIZE``, which launchers set; without them 0 of 1. Each pass over the sampler
    is an epoch with a permutation of its own (``shuffle=False``: in order); nobody has to call ``set_epoch``.

    Where rows don't divide by ranks, the last ranks have one row less, and ``len`` says so. ``pad=True`` evens them out
    with the first rows of the next epoch, which that epoch then leaves out: a pass has the same length on every rank, as
    collectives need it, and still no row comes twice in an epoch.

    A pass that is broken off begins again where it began, unless its state was loaded. Raises ``UserError`` for a dataset
    without rows and for a rank that doesn't exist.
    """

    def __init__(
        self,
        dataset: Sized | int,
        *,
        rank: int | None = None,
        size: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        pad: bool = False,
    ) -> None:
        self.rows = dataset if isinstance(dataset, int) else len(dataset)
        if self.rows < 1:
            raise UserError("the dataset has no rows to sample", "Give it more text, or leave its loader out.")
        self.rank, self.size = _place(rank, size)
        self.seed, self.shuffle, self.pad = seed, shuffle, pad
        # Both count rows over all ranks and epochs: row i of epoch e is e · rows + i.
        self._start = 0  # where this pass begins
        self._taken = 0  # rows of this rank since then

    def __len__(self) -> int:
        """Rows of this rank in the pass that is running or comes next; fewer in one that goes on from a state."""
        return max(0, -(-(self._end(self._start) - self._start - self.rank) // self.size))

    def __iter__(self) -> Iterator[int]:
        start, self._taken = self._start, 0
        end = self._end(start)
        for chunk in range(start + self.rank, end, _CHUNK * self.size):
            for row in self._rows_at(chunk, min(chunk + _CHUNK * self.size, end)):
                self._taken += 1
                yield row
        self._start, self._taken = end, 0

    def state_dict(self, taken: int | None = None) -> dict[str, Any]:
        """Where the sampler stands, for all ranks alike if they have taken the same number of batches; plain JSON.

        taken: rows that this rank has used of the present pass; by default those handed out, which is the same unless a
        ``DataLoader`` with worker processes has fetched batches ahead: give the batches used times their size there.
        """
        start, used = self._start, self._taken if taken is None else taken
        epoch, position = divmod(min(start + used * self.size, self._end(start)), self.rows)
        return {"epoch": epoch, "position": position, "rows": self.rows, "seed": self.seed, "shuffle": self.shuffle}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a ``state_dict``, of any rank and of a run with any number of ranks.

        Raises ``UserError`` where the number of rows, the seed or ``shuffle`` differ, since the place would mean
        other rows.
        """
        for name in ("rows", "seed", "shuffle"):
            if state[name] != getattr(self, name):
                raise UserError(
                    f"the sampler's state is for {name} {state[name]}, this one has {name} {getattr(self, name)}",
                    "Give the sampler the dataset and the arguments that it had, or start without the state.",
                )
        self._start, self._taken = state["epoch"] * self.rows + state["position"], 0

    def _end(self, start: int) -> int:
        """Where the pass that begins at ``start`` ends: with its epoch, or up to size − 1 rows later with ``pad``."""
        end = (start // self.rows + 1) * self.rows
        return end + (start - end) % self.size if self.pad else end

    def _rows_at(self, first: int, stop: int) -> list[int]:
        """The rows at first, first + size, … below stop, which may lie in several epochs."""
        rows: list[int] = []
        while first < stop:
            epoch, position = divmod(first, self.rows)
            index = np.arange(position, min(self.rows, stop - epoch * self.rows), self.size, dtype=np.int64)
            if self.shuffle:
                index = permute(index, self.rows, row_key(self.seed, "sampler", epoch))
            rows += index.tolist()
            first += len(index) * self.size
        return rows


def _place(rank: int | None, size: int | None) -> tuple[int, int]:
    """(rank, size), both given or both found."""
    if (rank is None) != (size is None):
        raise UserError(f"rank is {rank} and size is {size}", "Give both, or neither.")
    if rank is None or size is None:
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if not 0 <= rank < size:
        raise UserError(f"there is no rank {rank} of {size}", f"Ranks count from 0: give 0 to {size - 1}.")
    return rank, size
