"""Which row comes at which position: a keyed permutation per epoch and a deterministic mixture of sources.

Nothing is stored per row and nothing is drawn from a random stream: position 10⁹ costs what position 0 costs.
Ranks, micro-batches and files are unknown here; callers slice the positions.

Letters: n positions asked for, S sources.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from hashlib import blake2b
from itertools import pairwise
from math import gcd, lcm

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

# Six Feistel rounds: four already make a strong permutation when the round function is random (Luby and Rackoff 1988);
# two more cover for the cheap round function on domains of a few bits.
_ROUNDS = 6
# The longest period of a mixture: 0.7 and 0.3 repeat after 10 rows, odd weights after a million (2 s to lay out).
_SHARE_STEPS = 1_000_000


def row_key(seed: int, source: str, epoch: int) -> int:
    """The 64-bit key of one source's order in one epoch."""
    return int.from_bytes(blake2b(f"{seed}\0{source}\0{epoch}".encode(), digest_size=8).digest(), "little")


def permute(index: Ints, size: int, key: int) -> Ints:
    """Send each index of ``[0, size)`` to its place in the order that ``key`` names; a bijection of ``[0, size)``.

    index: int64 ``[n]``, each in ``[0, size)``. Returns int64 ``[n]``.

    A balanced Feistel network over the smallest even number of bits that holds ``size``, walked along its cycle until
    the value is below ``size`` (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002): under 4 passes on
    average, since the network's domain is less than 4 times ``size``.
    """
    if size < 1:
        raise ValueError(f"a permutation needs at least one row, got {size}")
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    value = np.asarray(index).astype(np.uint64)
    outside = np.arange(value.size)
    while outside.size:
        walked = _feistel(value[outside], half_bits, key)
        value[outside] = walked
        outside = outside[walked >= np.uint64(size)]
    return value.astype(np.int64)


def _feistel(value: NDArray[np.uint64], half_bits: int, key: int) -> NDArray[np.uint64]:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = value >> shift, value & mask
    for number in range(_ROUNDS):
        round_key = np.uint64((key + (number + 1) * 0x9E3779B97F4A7C15) & 0xFFFF_FFFF_FFFF_FFFF)
        left, right = right, left ^ (_mix(right + round_key) & mask)
    return (left << shift) | right


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014): every input bit moves every output bit."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@dataclass(frozen=True)
class MixtureSource:
    """One prepared dataset as the order sees it."""

    name: str
    rows: int
    """Rows in one epoch."""
    weight: float | None = None
    """Share of the rows, relative to the other weights; None in all sources: in proportion to their rows."""
    max_epochs: int | None = None
    """Epochs after which the source has ended and the others share its part; None: repeats for ever."""


@dataclass(frozen=True)
class DataState:
    """The whole state of the data: how many rows a run has taken, in all and per source."""

    position: int = 0
    taken: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class RowRefs:
    """Where the rows of n positions come from: each field int64 ``[n]``; ``source`` is −1 behind the data's end."""

    source: Ints
    epoch: Ints
    row: Ints


@dataclass(frozen=True)
class _Phase:
    """A stretch of positions in which the same sources take part."""

    position: int
    taken: Ints
    """Rows taken per source before the phase, ``[S]``."""
    pattern: Ints
    """Source of each position of one period, ``[period]``."""
    turn: Ints
    """How often its source came before within the period, ``[period]``."""
    per_period: Ints
    """Rows per period and source, ``[S]``."""

    def taken_at(self, position: int) -> Ints:
        periods, rest = divmod(position - self.position, self.pattern.size)
        inside = np.bincount(self.pattern[:rest], minlength=self.taken.size)
        return self.taken + periods * self.per_period + inside


class Mixture:
    """Sources by weight, each reshuffled every epoch: position → (source, epoch, row).

    The source that takes a position is the one whose next row is due first among those behind their share (Tijdeman's
    rule for the chairman assignment problem, Discrete Mathematics 32, 1980), so each source's count is within one row
    of its share at every position. Taking simply the largest deficit, as one would first write it, doesn't keep that
    bound with many sources. The pattern repeats after a period of the weights' common denominator.

    ``start`` is where these sources and weights began: a run whose mixture was edited goes on from what has been taken.
    """

    def __init__(self, sources: Sequence[MixtureSource], seed: int, start: DataState | None = None) -> None:
        self.sources = tuple(sources)
        self.seed = seed
        self.start = start or DataState()
        self._rows = np.array([source.rows for source in self.sources], dtype=np.int64)
        self._earlier = {name: n for name, n in self.start.taken.items() if name not in {s.name for s in self.sources}}
        self._phases, self.end = self._plan()

    def rows_at(self, start: int, stop: int) -> RowRefs:
        """The rows at positions ``[start, stop)``; n = stop − start."""
        self._check_begun(start)
        source = np.full(stop - start, -1, dtype=np.int64)
        taken = np.zeros(stop - start, dtype=np.int64)
        for phase, phase_end in self._spans():
            low, high = max(start, phase.position), stop if phase_end is None else min(stop, phase_end)
            if low >= high:
                continue
            periods, rest = np.divmod(np.arange(low, high) - phase.position, phase.pattern.size)
            who = phase.pattern[rest]
            source[low - start : high - start] = who
            taken[low - start : high - start] = phase.taken[who] + periods * phase.per_period[who] + phase.turn[rest]
        rows = np.where(source >= 0, self._rows[source], 1)
        epoch, index = np.divmod(taken, rows)
        return RowRefs(source, epoch, self._shuffled(source, epoch, index))

    def state_at(self, position: int) -> DataState:
        """What has been taken once the positions before ``position`` are done."""
        self._check_begun(position)
        phase = next(phase for phase in reversed(self._phases) if phase.position <= position)
        last = position if self.end is None else min(position, self.end)
        taken = phase.taken_at(last)
        counts = {source.name: int(n) for source, n in zip(self.sources, taken, strict=True)}
        return DataState(position, self._earlier | counts)

    def epochs_at(self, position: int) -> dict[str, float]:
        """How often each source has been passed through, as a fraction of its rows."""
        taken = self.state_at(position).taken
        return {source.name: taken[source.name] / source.rows for source in self.sources}

    def _shuffled(self, source: Ints, epoch: Ints, index: Ints) -> Ints:
        row = index.copy()
        for who, which in {(int(s), int(e)) for s, e in zip(source, epoch, strict=True) if s >= 0}:
            here = np.flatnonzero((source == who) & (epoch == which))
            spec = self.sources[who]
            row[here] = permute(index[here], spec.rows, row_key(self.seed, spec.name, which))
        return row

    def _check_begun(self, position: int) -> None:
        if position < self.start.position:
            raise ValueError(f"position {position} lies before this mixture's start at {self.start.position}")

    def _spans(self) -> list[tuple[_Phase, int | None]]:
        ends = [after.position for _, after in pairwise(self._phases)]
        return list(zip(self._phases, [*ends, self.end], strict=True))

    def _plan(self) -> tuple[list[_Phase], int | None]:
        """Phases from the start to the end of the data; the end is None where some source repeats for ever."""
        position = self.start.position
        taken = np.array([self.start.taken.get(source.name, 0) for source in self.sources], dtype=np.int64)
        phases: list[_Phase] = []
        while True:
            left = [_rows_left(source, int(done)) for source, done in zip(self.sources, taken, strict=True)]
            shares = [
                weight if rest is None or rest > 0 else 0
                for weight, rest in zip(whole_weights(self.sources), left, strict=True)
            ]
            if not any(shares):
                phases = phases or [_phase(position, taken, tuple(1 for _ in self.sources))]
                return phases, position
            phase = _phase(position, taken, _reduced(shares))
            phases.append(phase)
            lengths = [
                _offset_of_pick(phase, who, rest)
                for who, rest in enumerate(left)
                if rest is not None and shares[who] > 0
            ]
            if not lengths:
                return phases, None
            position += min(lengths)
            taken = phase.taken_at(position)


def whole_weights(sources: Sequence[MixtureSource]) -> list[int]:
    """The weights as whole numbers, e.g. 0.7 and 0.3 → 7 and 3.

    Where their sum would pass a million, shares are rounded to whole parts in a million: a weight of 0 stays 0, any
    other keeps at least one part.
    """
    given = [source.weight for source in sources]
    exact = [
        Fraction(str(weight if weight is not None else source.rows))
        for weight, source in zip(given, sources, strict=True)
    ]
    total = sum(exact, Fraction(0))
    if total <= 0:
        raise ValueError("at least one source needs a weight above 0")
    denominator = lcm(*(weight.denominator for weight in exact))
    whole = list(_reduced([int(weight * denominator) for weight in exact]))
    if sum(whole) > _SHARE_STEPS:
        whole = [max(round(weight / total * _SHARE_STEPS), 1) if weight > 0 else 0 for weight in exact]
    return list(_reduced(whole))


def _reduced(weights: Sequence[int]) -> tuple[int, ...]:
    divisor = gcd(*weights)
    return tuple(weight // divisor for weight in weights)


def _rows_left(source: MixtureSource, taken: int) -> int | None:
    return None if source.max_epochs is None else max(0, source.max_epochs * source.rows - taken)


def _offset_of_pick(phase: _Phase, who: int, count: int) -> int:
    """Positions from the phase's start until source ``who`` has been picked ``count`` times."""
    periods, rest = divmod(count - 1, int(phase.per_period[who]))
    return periods * phase.pattern.size + int(np.flatnonzero(phase.pattern == who)[rest]) + 1


def _phase(position: int, taken: Ints, weights: tuple[int, ...]) -> _Phase:
    pattern, turn = _period(weights)
    return _Phase(position, taken, pattern, turn, np.array(weights, dtype=np.int64))


@lru_cache(maxsize=64)
def _period(weights: tuple[int, ...]) -> tuple[Ints, Ints]:
    """One period of Tijdeman's schedule: pattern and turn, both int64 ``[sum(weights)]``.

    With s active sources and slack 1/(2s−2), row j of a source of share w may be taken from position (j + slack) / w
    on and is due by (j + 1 − slack) / w; among those that may, the one due first is taken. Whole-number arithmetic.
    """
    active = [who for who, weight in enumerate(weights) if weight > 0]
    period = sum(weights)
    if len(active) == 1:
        return np.full(period, active[0], dtype=np.int64), np.arange(period, dtype=np.int64)
    slack = 2 * len(active) - 2
    pattern = np.empty(period, dtype=np.int64)
    turn = np.empty(period, dtype=np.int64)
    # (first position that may take the row, source, j); ceil of (j·slack + 1)·period / (slack·weight)
    waiting = [(-(-period // (slack * weights[who])), who, 0) for who in active]
    heapq.heapify(waiting)
    ready: list[tuple[int, int, int]] = []
    for position in range(1, period + 1):
        while waiting and waiting[0][0] <= position:
            _, who, j = heapq.heappop(waiting)
            heapq.heappush(ready, ((j * slack + slack - 1) * period // (slack * weights[who]), who, j))
        _, who, j = heapq.heappop(ready)
        pattern[position - 1], turn[position - 1] = who, j
        first = -(-((j + 1) * slack + 1) * period // (slack * weights[who]))
        heapq.heappush(waiting, (first, who, j + 1))
    return pattern, turn
