"""A run that is edited, killed and moved between layouts: what its ranks are handed, target by target.

Each token of a source is another number, its place in the stream, so a target names its document and place by itself.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arriero.config.schema import Data
from arriero.config.schema import Source as SourceConfig
from arriero.data.loader import MicroBatch, Source, TrainingData, open_sources
from arriero.data.order import whole_weights
from arriero.data.packing import IGNORED_TARGET, Spans, pack_spans
from arriero.data.seen import positions_of_rows, rows_of_document, seen_by_source
from arriero.data.shards import ShardWriter, split_entry, write_manifest
from arriero.errors import UserError

NAMES = "abc"
FIRST = {name: 1_000 + 20_000 * number for number, name in enumerate(NAMES)}
"""The first token of each source; all below are padding."""


def write(folder: Path, name: str, lengths: Sequence[int], fingerprint: str = "f") -> None:
    """A source's dataset: documents of these lengths."""
    (folder / name).mkdir(parents=True)
    with ShardWriter(folder / name, "train", np.dtype("<u2"), max_tokens=37) as writer:
        writer.add(FIRST[name] + np.arange(sum(lengths)), np.array(lengths))
        shards = writer.close()
    splits = {"train": split_entry(shards, text_bytes=sum(lengths))}
    manifest = {"format_version": 1, "fingerprint": fingerprint, "largest_id": 65_000, "splits": splits, "tables": []}
    write_manifest(folder / name, manifest | {"tokenizer": {"fingerprint": "t", "eos_token_id": 1}})


def all_targets(name: str, lengths: Sequence[int], *, isolate: bool) -> set[int]:
    """Every target of a source: with isolation all tokens but the documents' first, without all but the stream's."""
    ends = np.cumsum(lengths)
    firsts = {0, *ends[:-1].tolist()} if isolate else {0}
    return {FIRST[name] + token for token in range(int(ends[-1])) if token not in firsts}


@dataclass(frozen=True)
class Taken:
    """One row that a rank was handed."""

    source: str
    epoch: int
    targets: tuple[int, ...]
    documents: tuple[int, ...]


@dataclass
class Run:
    """A run as its ranks see it. ``log[p]`` is the row at position p."""

    packing: str
    isolate: bool
    seed: int
    log: list[Taken] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)

    def start(self, sources: Sequence[SourceConfig], seq_len: int, back: int = 0) -> TrainingData:
        """Go on with this recipe from the newest record, or ``back`` records before it; later rows weren't taken."""
        recipe = Data(
            sources=tuple(sources),
            seq_len=seq_len,
            packing=self.packing,
            isolate_documents=self.isolate,
            validation_split=0,
        )
        opened = open_sources(recipe)
        self.records = self.records[: max(0, len(self.records) - back)]
        if not self.records:
            self.log.clear()
            return TrainingData(opened, seed=self.seed)
        del self.log[self.records[-1]["position"] :]
        return TrainingData.continued(opened, seed=self.seed, record=json.loads(json.dumps(self.records[-1])))

    def step(self, data: TrainingData, layout: tuple[int, int, int]) -> None:
        """One step over all ranks."""
        size, micro_batch, accumulation = layout
        position = len(self.log)
        end = position + size * micro_batch * accumulation
        end = end if data.mixture.end is None else min(end, data.mixture.end)
        found: dict[int, Taken] = {}
        for rank in range(size):
            batches = list(
                data.micro_batches(
                    position, end=end, rank=rank, size=size, micro_batch=micro_batch, accumulation=accumulation
                )
            )
            assert len(batches) == accumulation
            for batch in batches:
                assert tuple(batch.input_ids.shape) == (micro_batch, data.sources[0].training.seq_len)
                for place, row in self._rows(data, batch):
                    assert place not in found
                    found[place] = row
        assert sorted(found) == list(range(position, end)), "ranks' rows are the step's, each once"
        self.log += [found[place] for place in range(position, end)]

    def _rows(self, data: TrainingData, batch: MicroBatch) -> list[tuple[int, Taken]]:
        rows = []
        for n, place in enumerate(batch.places):
            inputs, targets, positions = (
                tensor[n].numpy() for tensor in (batch.input_ids, batch.targets, batch.position_ids)
            )
            counted = targets != IGNORED_TARGET
            assert (targets[counted] == inputs[counted] + 1).all()
            if place.source < 0:
                assert not counted.any()
                continue
            real = inputs >= 1_000
            assert not counted[~real].any()
            # What attends to what: where positions go on, so does the text.
            on = real[1:] & (positions[1:] == positions[:-1] + 1)
            assert (inputs[1:][on] == inputs[:-1][on] + 1).all()
            assert (positions[1:][~on & real[1:]] == 0).all()
            source = data.sources[place.source]
            if self.isolate:
                edges = FIRST[source.name] + np.cumsum(source.training.stream.document_lengths())
                assert (positions[np.isin(inputs, edges) & real] == 0).all()
            documents = tuple(batch.rows[n].documents.tolist())
            rows.append((place.position, Taken(source.name, place.epoch, tuple(targets[counted].tolist()), documents)))
        return rows

    def of(self, name: str) -> list[Taken]:
        return [row for row in self.log if row.source == name]


def check_epochs(run: Run, targets: dict[str, set[int]]) -> dict[str, int]:
    """Each target once in every epoch but the last, there at most once. Returns the epochs begun of each source."""
    begun = {}
    for name, wanted in targets.items():
        by_epoch: dict[int, Counter[int]] = {}
        order = []
        for row in run.of(name):
            by_epoch.setdefault(row.epoch, Counter()).update(row.targets)
            order.append(row.epoch)
        assert order == sorted(order)
        assert sorted(by_epoch) == list(range(len(by_epoch))), "no epoch is left out"
        for epoch, found in by_epoch.items():
            assert max(found.values(), default=0) <= 1, f"{name}: a target comes twice in epoch {epoch}"
            assert set(found) <= wanted
            if epoch < len(by_epoch) - 1:
                assert set(found) == wanted, f"{name}: targets of epoch {epoch} are lost"
        begun[name] = len(by_epoch)
    return begun


def check_seen(run: Run, data: TrainingData) -> None:
    """`data seen` gives what the log gives."""
    position = len(run.log)
    for number, source in enumerate(data.sources):
        seen, rows = seen_by_source(data, position)[source.name], run.of(source.name)
        assert seen.rows == len(rows)
        assert seen.documents_seen == len({document for row in rows for document in row.documents})
        assert seen.max_times == len({row.epoch for row in rows})
        # Within the rounding of a last row that is not full.
        assert seen.max_times - 1 <= seen.epochs <= seen.max_times
        start = data.mixture.start.position
        for document in range(min(3, source.training.stream.documents)):
            came = list(positions_of_rows(data, number, rows_of_document(source.training, document), position))
            log = [(p, run.log[p]) for p in range(start, position)]
            assert came == [(p, row.epoch) for p, row in log if row.source == source.name and document in row.documents]


def check_shares(run: Run, data: TrainingData, begin: int) -> None:
    """Since the mixture began each source is within one row of its share, as long as none has ended."""
    mixture = data.mixture
    if any(source.max_epochs is not None for source in mixture.sources):
        return
    weights = whole_weights(mixture.sources)
    counts = Counter({name: n - mixture.start.taken.get(name, 0) for name, n in mixture.state_at(begin).taken.items()})
    for position in range(begin, len(run.log)):
        counts[run.log[position].source] += 1
        for source, weight in zip(mixture.sources, weights, strict=True):
            share = Fraction(weight, sum(weights)) * (position + 1 - mixture.start.position)
            assert abs(counts[source.name] - share) < 1


def check_passes(run: Run, data: TrainingData, begin: int) -> None:
    """Without weights: first what is left of the epochs begun, then all sources alike, pass after pass."""
    mixture = data.mixture
    if mixture.start.position != begin:
        return
    before = {
        source.name: Counter(row.epoch for row in run.log[:begin] if row.source == source.name)
        for source in mixture.sources
    }
    last = {name: max(epochs, default=-1) for name, epochs in before.items()}
    new = dict.fromkeys(last, 0)
    old_rows_over = False
    for position in range(begin, len(run.log)):
        row = run.log[position]
        if row.epoch == last[row.source]:
            assert not (old_rows_over and new[row.source] == 0), "an epoch that had begun ends before another begins"
            continue
        old_rows_over = True
        last[row.source], new[row.source] = row.epoch, new[row.source] + 1
        active = [new[s.name] for s in mixture.sources if s.max_epochs is None or last[s.name] < s.max_epochs - 1]
        assert not active or max(active) - min(active) <= 1


KINDS = [("stream", True), ("stream", False), ("best_fit", True)]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, dict[str, list[int]]]]:
    """Twelve corpora of three sources each, written once: syncing files would cost more than all the rest."""
    random, made = np.random.default_rng(3), []
    for number in range(12):
        folder = tmp_path_factory.mktemp(f"corpus-{number}")
        lengths = {
            name: [*random.choice([1, 1, 2, 3, 5, 8, 13, 21, 34], random.integers(4, 10)).tolist(), 25]
            for name in NAMES
        }
        for name in NAMES:
            write(folder, name, lengths[name])
        made.append((folder, lengths))
    return made


@dataclass
class Recipe:
    """What an edit may change, drawn anew by ``edited``."""

    sources: list[SourceConfig]
    weighted: bool
    seq_len: int


def edited(random: np.random.Generator, folder: Path, begun: dict[str, int], old: Recipe | None) -> Recipe:
    """Other sources, weights and limits, or another seq_len, or both."""
    what = random.integers(0, 3) if old else 2
    seq_len = old.seq_len if old and what == 0 else int(random.integers(2, 25))
    if old and what == 1:
        return Recipe(old.sources, old.weighted, seq_len)
    names = random.permutation(list(NAMES))[: random.choice([1, 2, 3, 3])]
    weighted, limited = random.random() < 0.5, random.random() < 0.5
    weights = random.integers(0, 7, len(names)) if len(names) > 1 else [1]
    sources = [
        SourceConfig(
            path=str(folder / name),
            weight=float(max(weight, int(number == 0))) if weighted else None,
            max_epochs=max(1, begun[name] + int(random.integers(-1, 3))) if limited and random.random() < 0.7 else None,
        )
        for number, (name, weight) in enumerate(zip(names, weights, strict=True))
    ]
    return Recipe(sources, weighted, seq_len)


@pytest.mark.parametrize(("packing", "isolate"), KINDS)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_every_target_as_often_as_declared_whatever_is_edited(
    pool: list[tuple[Path, dict[str, list[int]]]], packing: str, isolate: bool, seed: int
) -> None:
    """The seed is the schedule: drawn one by one, edits would stay few and small, and epochs would rarely be cut twice."""
    random = np.random.default_rng(seed)
    folder, lengths = pool[random.integers(len(pool))]
    targets = {name: all_targets(name, lengths[name], isolate=isolate) for name in NAMES}
    run, begun = Run(packing, isolate, seed), dict.fromkeys(NAMES, 0)
    recipe = edited(random, folder, begun, None)
    for _ in range(random.integers(2, 9)):
        # A start: by another recipe or the same, in any layout, from the newest checkpoint or one before. What was taken
        # behind that one, by a run that was killed, is undone.
        if random.random() < 0.8:
            recipe = edited(random, folder, begun, recipe)
        data = run.start(recipe.sources, recipe.seq_len, back=int(random.choice([0, 0, 0, 1, 2])))
        begin, every = len(run.log), random.integers(1, 3)
        layout = (int(random.integers(1, 5)), int(random.integers(1, 3)), int(random.integers(1, 3)))
        for number in range(1, random.integers(2, 7)):
            if data.mixture.end is not None and len(run.log) >= data.mixture.end:
                break
            run.step(data, layout)
            if number % every == 0:
                run.records.append(data.record(len(run.log)))
        begun = check_epochs(run, targets)
        for config in recipe.sources:
            since = [row.epoch for row in run.log[begin:] if row.source == config.label]
            assert config.max_epochs is None or all(epoch < config.max_epochs for epoch in since)
        (check_shares if recipe.weighted else check_passes)(run, data, begin)
        check_seen(run, data)
    # At last every source, also one that was dropped, to the end of an epoch: nothing is missing, nothing too much.
    begun = {name: n + 1 for name, n in begun.items()}
    sources = [SourceConfig(path=str(folder / name), weight=1, max_epochs=begun[name]) for name in NAMES]
    data = run.start(sources, int(random.integers(2, 25)))
    assert data.mixture.end is not None
    while len(run.log) < data.mixture.end:
        run.step(data, (2, 5, 2))
    for name, wanted in targets.items():
        found = Counter(target for row in run.of(name) for target in row.targets)
        assert found == dict.fromkeys(wanted, begun[name])
    assert data.mixture.epochs_at(len(run.log)) == {name: float(n) for name, n in begun.items()}


def open_one(folder: Path, name: str, seq_len: int, **keys: Any) -> Source:
    configs = (SourceConfig(path=str(folder / name)),)
    (source,) = open_sources(Data(sources=configs, seq_len=seq_len, **({"validation_split": 0} | keys)))
    return source


def test_an_epoch_cut_anew_by_hand(tmp_path: Path) -> None:
    """Documents of 6 and 15 tokens in rows of 4: 20 inputs, 5 rows. Two rows are taken, then rows are 6 long."""
    write(tmp_path, "a", [6, 15])
    before = TrainingData([open_one(tmp_path, "a", 4)], seed=34)
    assert before.mixture.rows_at(0, 2).row.tolist() == [4, 2]
    after = TrainingData.continued([open_one(tmp_path, "a", 6)], seed=34, record=before.record(2))
    rows = after.sources[0].training
    # Left are the inputs 0–7 and 12–15: rows of 6 and 6, the second with a hole in it.
    assert rows.rest is not None
    assert [row.input_ids.tolist() for row in (rows[len(rows)], rows[len(rows) + 1])] == [
        [1000, 1001, 1002, 1003, 1004, 1005],
        [1006, 1007, 1012, 1013, 1014, 1015],
    ]
    first, second = rows[len(rows)], rows[len(rows) + 1]
    assert first.targets.tolist() == [1001, 1002, 1003, 1004, 1005, IGNORED_TARGET]
    assert second.targets.tolist() == [1007, 1008, 1013, 1014, 1015, 1016], "a target at a cut is kept"
    assert second.position_ids.tolist() == [0, 1, 0, 1, 2, 3], "positions begin again at the hole"
    assert (first.documents.tolist(), second.documents.tolist()) == ([0], [1])
    # Two rows before the end of epoch 0, whole epochs of ceil(20 / 6) rows behind it.
    assert after.mixture.epochs_at(2) == {"a": 0.5}
    assert after.mixture.rows_at(2, 8).epoch.tolist() == [0, 0, 1, 1, 1, 1]
    assert after.record(4)["taken"] == {"a": 4}
    # What stood at the end of an epoch has no rest.
    whole = TrainingData.continued([open_one(tmp_path, "a", 6)], seed=34, record=before.record(5))
    assert whole.sources[0].training.rest is None
    assert whole.mixture.rows_at(5, 7).epoch.tolist() == [1, 1]


def test_gaps_that_best_fit_can_not_fill_are_cut_as_a_stream_is(tmp_path: Path) -> None:
    """42 inputs are 6 rows of 7. Seven pieces of 4 would be a row each: cut one after the other they are four."""
    write(tmp_path, "a", [43])
    rows = open_one(tmp_path, "a", 7, packing="best_fit").training
    spans = Spans(np.arange(0, 42, 6), np.full(7, 4))
    assert pack_spans(spans, 7).rows == 7
    rest = rows.with_rest(spans).rest
    assert rest is not None
    assert rest.rows == 4
    assert int(rest.length.sum()) == 28


def test_what_would_make_other_rows_of_a_dataset_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path, "a", [6, 9, 12, 3, 20])
    write(tmp_path, "b", [6, 15])
    sources = [open_one(tmp_path, name, 4) for name in "ab"]
    record = TrainingData(sources, seed=2).record(5)
    with pytest.raises(UserError, match=r"'a' had 13 rows of 4 tokens when .* now it has 12"):
        TrainingData.continued([open_one(tmp_path, "a", 8, packing="best_fit"), sources[1]], seed=2, record=record)
    # Also of a source that was left out for a while.
    record = TrainingData.continued(sources[1:], seed=2, record=record).record(7)
    assert [entry["name"] for entry in record["dropped"]] == ["a"]
    write(tmp_path / "new", "a", [6, 9, 12, 3, 20], fingerprint="g")
    with pytest.raises(UserError, match=r"'a' has changed since .* fingerprint f then, g now"):
        TrainingData.continued([open_one(tmp_path / "new", "a", 4), sources[1]], seed=2, record=record)
