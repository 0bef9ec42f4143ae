"""Which row comes at which position: a keyed permutation per epoch and a deterministic mixture of sources.

Nothing is stored per row and nothing is drawn from a random stream: position 10⁹ costs what position 0 costs.
Ranks, micro-batches and files are unknown here; callers slice the positions.

Letters: n positions asked for, S sources.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from hashlib import blake2b
from math import gcd, lcm

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

# Six Feistel rounds: four already make a strong permutation when the round function is random (Luby and Rackoff 1988);
# two more cover for the cheap round function on domains of a few bits.
_ROUNDS = 6
_CHUNK = 1 << 20  # rows of an order that are laid out at once
# The longest period of a mixture: 0.7 and 0.3 repeat after 10 rows, odd weights after a million (2 s to lay out).
_LONGEST_PERIOD = 1_000_000


def row_key(seed: int, source: str, epoch: int, part: int = 0) -> int:
    """The 64-bit key of one source's order in one epoch. part: how often what was left of the epoch was cut anew."""
    text = f"{seed}\0{source}\0{epoch}" + (f"\0{part}" if part else "")
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


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


def taken_of(size: int, taken: int, key: int) -> NDArray[np.bool_]:
    """Which of ``size`` rows are among the first ``taken`` of the order that ``key`` names: bool ``[size]``."""
    found = np.zeros(size, dtype=bool)
    for start in range(0, taken, _CHUNK):
        found[permute(np.arange(start, min(start + _CHUNK, taken), dtype=np.int64), size, key)] = True
    return found


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
class Rest:
    """What was left of an epoch when rows got another length, cut into rows of today's."""

    epoch: int
    rows: int
    """At most those of a whole epoch."""
    part: int
    """How often what was left of the epoch has been cut anew, from 1."""


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
    shift: int = 0
    """Added to the rows taken, it counts them as if all had had today's length."""
    rest: Rest | None = None
    """Rows that end the epoch in which the length changed; whole epochs follow."""

    def left_of_epoch(self, counted: int) -> int:
        """Rows until the end of the epoch that is under way after ``counted`` rows; 0 between two."""
        if self.rest is not None and counted // self.rows == self.rest.epoch:
            return (self.rest.epoch + 1) * self.rows - counted
        return -counted % self.rows


@dataclass(frozen=True)
class DataState:
    """The whole state of the data: how many rows a run has taken, in all and per source."""

    position: int = 0
    taken: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class RowRefs:
    """Where the rows of n positions come from: each field int64 ``[n]``; ``source`` is −1 behind the data's end.

    ``row`` is below the source's ``rows``, or from there on one of its rest.
    """

    source: Ints
    epoch: Ints
    row: Ints


@dataclass(frozen=True)
class _Phase:
    """A stretch of a cycle in which the same sources take part: positions ``[start, stop)``, relative to the cycle."""

    start: int
    stop: int | None
    taken: Ints
    """Rows taken per source in the cycle before the phase, ``[S]``."""
    pattern: Ints
    """Source of each position of one period, ``[period]``."""
    turn: Ints
    """How often its source came before within the period, ``[period]``."""
    per_period: Ints
    """Rows per period and source, ``[S]``."""

    def taken_at(self, place: int) -> Ints:
        periods, rest = divmod(place - self.start, self.pattern.size)
        inside = np.bincount(self.pattern[:rest], minlength=self.taken.size)
        return self.taken + periods * self.per_period + inside


@dataclass(frozen=True)
class _Cycle:
    """Phases that come round ``repeats`` times, from ``position`` on; without a length they never end."""

    position: int
    taken: Ints
    """Rows taken per source before it, ``[S]``."""
    phases: tuple[_Phase, ...]
    length: int | None
    repeats: int | None
    per_round: Ints
    """Rows that one round takes of each source, ``[S]``."""

    @property
    def end(self) -> int | None:
        return None if self.length is None or self.repeats is None else self.position + self.length * self.repeats

    def rounds(self, positions: Ints) -> tuple[Ints, Ints]:
        """(round, place in it) of each position."""
        if not self.length:
            return np.zeros_like(positions), positions - self.position
        return np.divmod(positions - self.position, self.length)

    def taken_at(self, position: int) -> Ints:
        if self.end is not None and position >= self.end:
            return self.taken + (self.repeats or 0) * self.per_round
        rounds, place = (int(number[0]) for number in self.rounds(np.array([position], dtype=np.int64)))
        phase = next(phase for phase in reversed(self.phases) if phase.start <= place)
        return self.taken + rounds * self.per_round + phase.taken_at(place)


class Mixture:
    """Sources by weight, each reshuffled every epoch: position → (source, epoch, row).

    The source that takes a position is the one whose next row is due first among those behind their share (Tijdeman's
    rule for the chairman assignment problem, Discrete Mathematics 32, 1980), so each source's count is within one row
    of its share at every position. Taking simply the largest deficit, as one would first write it, doesn't keep that
    bound with many sources. The pattern repeats after a period of the weights' common denominator.

    Without weights sources come in proportion to their rows, and each pass over all of them takes every row of every
    source exactly once before the next begins.

    ``start`` is where these sources and weights began: a run whose mixture was edited goes on from what has been taken.
    A source whose rows changed their length in the middle of an epoch stands as many rows before that epoch's end as its
    rest has, takes these, and then whole epochs again.
    ``end`` is the position behind the last row, None where some source repeats for ever.
    """

    def __init__(self, sources: Sequence[MixtureSource], seed: int, start: DataState | None = None) -> None:
        self.sources = tuple(sources)
        self.seed = seed
        self.start = start or DataState()
        self._rows = np.array([source.rows for source in self.sources], dtype=np.int64)
        self._earlier = {name: n for name, n in self.start.taken.items() if name not in {s.name for s in self.sources}}
        taken = np.array([self.start.taken.get(s.name, 0) + s.shift for s in self.sources], dtype=np.int64)
        weighted = any(source.weight is not None for source in self.sources)
        self._cycles = (_weighted if weighted else _proportional)(self.sources, self.start.position, taken)
        self.end = self._cycles[-1].end

    def rows_at(self, start: int, stop: int) -> RowRefs:
        """The rows at positions ``[start, stop)``; n = stop − start."""
        self._check_begun(start)
        positions = np.arange(start, stop, dtype=np.int64)
        source = np.full(stop - start, -1, dtype=np.int64)
        taken = np.zeros(stop - start, dtype=np.int64)
        for cycle in self._cycles:
            inside = np.flatnonzero((positions >= cycle.position) & (positions < _or_huge(cycle.end)))
            rounds, place = cycle.rounds(positions[inside])
            for phase in cycle.phases:
                part = np.flatnonzero((place >= phase.start) & (place < _or_huge(phase.stop)))
                periods, rest = np.divmod(place[part] - phase.start, phase.pattern.size)
                who, here = phase.pattern[rest], inside[part]
                source[here] = who
                before = cycle.taken + phase.taken
                taken[here] = (
                    before[who]
                    + rounds[part] * cycle.per_round[who]
                    + periods * phase.per_period[who]
                    + phase.turn[rest]
                )
        rows = np.where(source >= 0, self._rows[source], 1)
        epoch, index = np.divmod(taken, rows)
        return RowRefs(source, epoch, self._shuffled(source, epoch, index))

    def state_at(self, position: int) -> DataState:
        """What has been taken once the positions before ``position`` are done."""
        counts = self.counted_at(position)
        return DataState(position, self._earlier | {s.name: counts[s.name] - s.shift for s in self.sources})

    def counted_at(self, position: int) -> dict[str, int]:
        """The rows taken of each source, counted as if all had had today's length."""
        self._check_begun(position)
        last = min(position, _or_huge(self.end))
        cycle = next(cycle for cycle in reversed(self._cycles) if cycle.position <= last)
        return {source.name: int(n) for source, n in zip(self.sources, cycle.taken_at(last), strict=True)}

    def epochs_at(self, position: int) -> dict[str, float]:
        """How often each source has been passed through, as a fraction of its rows."""
        counts = self.counted_at(position)
        return {source.name: counts[source.name] / source.rows for source in self.sources}

    def _shuffled(self, source: Ints, epoch: Ints, index: Ints) -> Ints:
        row = index.copy()
        for who, which in {(int(s), int(e)) for s, e in zip(source, epoch, strict=True) if s >= 0}:
            here = np.flatnonzero((source == who) & (epoch == which))
            spec, rest = self.sources[who], self.sources[who].rest
            if rest is not None and rest.epoch == which:
                key = row_key(self.seed, spec.name, which, rest.part)
                row[here] = spec.rows + permute(index[here] - (spec.rows - rest.rows), rest.rows, key)
            else:
                row[here] = permute(index[here], spec.rows, row_key(self.seed, spec.name, which))
        return row

    def _check_begun(self, position: int) -> None:
        if position < self.start.position:
            raise ValueError(f"position {position} lies before this mixture's start at {self.start.position}")


def _or_huge(end: int | None) -> int:
    return np.iinfo(np.int64).max if end is None else end


def _weighted(sources: Sequence[MixtureSource], position: int, taken: Ints) -> list[_Cycle]:
    """One round by the given weights, in which sources end with their ``max_epochs``."""
    limits = [
        None if source.max_epochs is None else max(0, source.max_epochs * source.rows - int(done))
        for source, done in zip(sources, taken, strict=True)
    ]
    phases, length, per_round = _phases(whole_weights(sources), limits)
    return [_Cycle(position, taken, phases, length, 1, per_round)]


def _proportional(sources: Sequence[MixtureSource], position: int, taken: Ints) -> list[_Cycle]:
    """Whole passes over all sources that have not ended; first, what is left of the passes that have begun."""
    rows = [source.rows for source in sources]
    begun = [
        0
        if source.max_epochs is not None and done >= source.max_epochs * source.rows
        else source.left_of_epoch(int(done))
        for source, done in zip(sources, taken, strict=True)
    ]
    cycles = []
    if any(begun):
        phases, length, per_round = _phases(begun, list(begun))
        cycles.append(_Cycle(position, taken, phases, length, 1, per_round))
    while not cycles or cycles[-1].end is not None:
        if cycles:
            position = _or_huge(cycles[-1].end)
            taken = cycles[-1].taken_at(position)
        epochs = [int(done) // count for count, done in zip(rows, taken, strict=True)]
        left = [
            None if source.max_epochs is None else source.max_epochs - done
            for source, done in zip(sources, epochs, strict=True)
        ]
        active = [count if rest is None or rest > 0 else 0 for count, rest in zip(rows, left, strict=True)]
        if not any(active) and cycles:
            break
        finite = [rest for rest in left if rest is not None and rest > 0]
        phases, length, per_round = _phases(active, list(active))
        cycles.append(
            _Cycle(position, taken, phases, length, min(finite, default=None if any(active) else 0), per_round)
        )
    return cycles


def _phases(weights: Sequence[int], limits: Sequence[int | None]) -> tuple[tuple[_Phase, ...], int | None, Ints]:
    """By these weights until every source has reached its limit: the phases, their length, the rows of each source.

    Whoever reaches its limit drops out and the others share its part. The length is None where a source has no limit.
    """
    place = 0
    taken = np.zeros(len(weights), dtype=np.int64)
    phases: list[_Phase] = []
    while True:
        left = [None if limit is None else limit - int(done) for limit, done in zip(limits, taken, strict=True)]
        shares = [0 if rest is not None and rest <= 0 else weight for weight, rest in zip(weights, left, strict=True)]
        if not any(shares):
            return tuple(phases), place, taken
        shares = _bounded(shares)
        pattern, turn = _period(tuple(shares))
        open_end = _Phase(place, None, taken, pattern, turn, np.array(shares, dtype=np.int64))
        ends = [
            place + _offset_of_pick(open_end, who, rest)
            for who, rest in enumerate(left)
            if rest is not None and shares[who] > 0
        ]
        if not ends:
            return (*phases, open_end), None, taken
        phases.append(replace(open_end, stop=min(ends)))
        place = min(ends)
        taken = open_end.taken_at(place)


def _bounded(weights: Sequence[int]) -> list[int]:
    """The weights in lowest terms; rounded to whole parts in a million where their sum would pass a million.

    A weight of 0 stays 0, any other keeps at least one part.
    """
    divisor = gcd(*weights)
    lowest = [weight // divisor for weight in weights]
    total = sum(lowest)
    if total <= _LONGEST_PERIOD:
        return lowest
    return [max((weight * _LONGEST_PERIOD + total // 2) // total, 1) if weight > 0 else 0 for weight in lowest]


def whole_weights(sources: Sequence[MixtureSource]) -> list[int]:
    """The given weights as whole numbers, e.g. 0.7 and 0.3 → 7 and 3; without weights the rows, in lowest terms."""
    exact = [Fraction(str(source.weight if source.weight is not None else source.rows)) for source in sources]
    if not any(exact):
        raise ValueError("at least one source needs a weight above 0")
    denominator = lcm(*(weight.denominator for weight in exact))
    return _bounded([int(weight * denominator) for weight in exact])


def _offset_of_pick(phase: _Phase, who: int, count: int) -> int:
    """Places from the phase's start until source ``who`` has been picked ``count`` times."""
    periods, rest = divmod(count - 1, int(phase.per_period[who]))
    return periods * phase.pattern.size + int(np.flatnonzero(phase.pattern == who)[rest]) + 1


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
