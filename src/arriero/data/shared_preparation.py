"""One preparation shared by several machines: each encodes a shard of the sources, and a merge makes one dataset of them.

Shard I of N takes the I-th of N equal stretches of the source files' bytes, in their order. A file lies in the stretch
that it begins in, but plain JSON lines are divided: a line belongs to the stretch that it begins in. Shards keep their
documents whole and in order in ``.OUT.shards/I-of-N`` beside the dataset, without dividing them into splits. The merge
does that, and gives the bytes that one machine would have made.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from arriero.__version__ import __version__
from arriero.data.batches import Batch
from arriero.data.hub import Unreachable
from arriero.data.parts import ROWS, read_rows
from arriero.data.plan import (
    Plan,
    Report,
    Say,
    hash_inputs,
    list_preparation,
    nothing_found,
    refuse_changed,
    sayer,
    with_inputs,
)
from arriero.data.prepare import (
    Course,
    Made,
    PrepareResult,
    begin,
    complete,
    encode_sources,
    interrupted,
    moved_across,
    refuse_foreign,
    result_of,
    run_preparation,
    tidy,
    turn,
)
from arriero.data.shards import Shard, TokenStream, check_files, known_files, read_manifest, write_whole
from arriero.data.sources import ReadLog, SourceFile, is_divisible
from arriero.data.tokenizer import joint_share_compared
from arriero.disk import hash_file
from arriero.errors import UserError

logger = logging.getLogger(__name__)

_NOTE = "shard.json"  # written last: without it a shard isn't finished
_MERGE_TOKENS = 1 << 22  # copied at once: 32 MB of memory


@dataclass(frozen=True)
class ShardNumber:
    """Which shard of how many, as in ``0/3``."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


def parse_shard(text: str) -> ShardNumber:
    """``I/N`` with 0 ≤ I < N."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not int(found[1]) < int(found[2]):
        raise UserError(
            f"there is no shard {text!r}",
            "Give I/N with I from 0 to N - 1: 0/3, 1/3 and 2/3 are three machines' shares.",
        )
    return ShardNumber(int(found[1]), int(found[2]))


# --------------------------------------------------------------------------------------------------------------- shard


def prepare_shard(
    sources: Sequence[str | Path] | str | Path,
    shard: str,
    *,
    tokenizer: Any,
    out: str | Path,
    progress: Report | None = None,
    **options: Any,
) -> PrepareResult:
    """Prepares shard ``I/N`` of a dataset in a folder beside ``out``, where ``merge_shards`` finds it.

    The other arguments are those of ``prepare``, the same for each shard and for the merge; ``out`` lies on a disk that
    all machines share. Only files that the shard needs are read. Counts of the result are the shard's. A shard that is
    there is a cache hit, as is one of a dataset that was merged already; killed, it goes on after its last finished part.
    """
    started, out = time.perf_counter(), Path(out)
    this = parse_shard(shard)
    refuse_foreign(out)
    listed = list_preparation(sources, tokenizer=tokenizer, **options)
    chosen = _chosen(listed, this)
    # the merge divides documents into splits: the limit is known here, the only document of a split is not
    plan = hash_inputs(replace(chosen, options={**listed.options, "validation_split": 0.0}), progress)
    folder = _work_folder(out) / f"{this.number}-of-{this.count}"
    if merged := _merged_already(listed, plan, out):
        return replace(merged, seconds=time.perf_counter() - started)
    folder.parent.mkdir(parents=True, exist_ok=True)
    say = sayer(plan, progress, started)
    with turn(folder, say):
        course, others = _course_of_others(folder, listed.fingerprint)
        note = _finished(folder, listed, plan, course)
        if note is not None:
            return _result(folder, note, cache_hit=True, seconds=time.perf_counter() - started)
        before, part = interrupted(plan, folder)
        if others and before.engine != course.engine:
            logger.warning("encoding with tokenizers, which is slower, as shard %s does: %s", others, course.difference)
            before, part = course, None
        try:
            made = encode_sources(plan, folder, before, part, say, listed.expected_bytes, as_table=False)
            refuse_changed(plan)
            note = _note(listed, plan, made)
            write_whole(folder / _NOTE, json.dumps(note).encode())
            tidy(folder, known_files(note) | {_NOTE})
        except Unreachable:  # what is finished stays for the next time, as after an interrupt
            raise
        except Exception as error:
            shutil.rmtree(folder, ignore_errors=True)
            if not isinstance(error, OSError):
                raise
            raise UserError(
                f"{folder} can't be written: {error}", "See to the space and the permissions there.", exit_code=1
            ) from error
    return _result(folder, note, cache_hit=False, seconds=time.perf_counter() - started, found=made.found_bytes)


def _work_folder(out: Path) -> Path:
    return out.with_name(f".{out.name}.shards")


def _chosen(listed: Plan, shard: ShardNumber) -> Plan:
    """The plan of only the shard's files and parts of files; unreadable ones are the first shard's to report."""
    sizes = [size for size, _ in listed.modified]
    total, begin = sum(sizes), 0
    low, high = (total * number // shard.count for number in (shard.number, shard.number + 1))
    last = shard.number == shard.count - 1
    files: list[SourceFile] = []
    modified: list[tuple[int, int]] = []
    for file, change in zip(listed.files, listed.modified, strict=True):
        end = begin + change[0]
        begins_here = low <= begin < high or (last and begin >= high)
        edge_inside = begin < high < end or begin < low < end
        if edge_inside and is_divisible(file):
            file = replace(file, start=max(low - begin, 0), stop=min(high, end) - begin)
            begins_here = max(low, begin) < min(high, end)
        if begins_here:
            files.append(file)
            modified.append(change)
        begin = end
    unreadable = listed.unreadable if shard.number == 0 else ()
    return replace(listed, files=tuple(files), modified=tuple(modified), unreadable=unreadable)


def _note(listed: Plan, plan: Plan, made: Made) -> dict[str, Any]:
    """What the merge needs to know of a finished shard, for JSON; splits, tables and lists are as in a manifest."""
    written = made.written
    return {
        "listing": listed.fingerprint,
        "fingerprint": plan.fingerprint,
        "arriero": __version__,
        "inputs": plan.inputs,
        "modified": plan.modified,
        "files": [file.name for file in plan.files],
        **made.entries,
        "documents": written.documents["train"],
        "tokens": written.tokens,
        "text_bytes": written.text_bytes["train"],
        "lowest": written.lowest,
        "highest": written.highest,
        "log": written.log.state(),
        "fields": list(written.log.fields),
        "engine": made.encoder.engine,
        "engine_reason": made.reason,
        "share_compared": made.encoder.share_compared,
        "compared": made.encoder.state(),
        "add_bos": plan.add_bos,
    }


def _read_note(folder: Path) -> dict[str, Any] | None:
    try:
        note = json.loads((folder / _NOTE).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise UserError(
            f"{folder / _NOTE} can't be read ({error})", f"Remove {folder} and prepare it again."
        ) from error
    assert isinstance(note, dict)
    return note


def _finished(folder: Path, listed: Plan, plan: Plan, course: Course) -> dict[str, Any] | None:
    """The note of a finished shard of this very plan, encoded as the other shards are."""
    note = _read_note(folder)
    expected = {"listing": listed.fingerprint, "fingerprint": plan.fingerprint, "arriero": __version__}
    if note is None or any(note[name] != value for name, value in expected.items()):
        return None
    if (plan.verify and note["share_compared"] < 1) or (course.engine == "tokenizers" != note["engine"]):
        return None
    try:
        check_files(folder, note)
    except UserError as error:
        logger.warning("preparing again: %s", error.problem)
        return None
    return note


def _course_of_others(folder: Path, listing: str) -> tuple[Course, str]:
    """With ``tokenizers`` where another shard of the same preparation had to use it, and which one that is."""
    for other in sorted(folder.parent.glob(f"*-of-{folder.name.rpartition('-')[2]}")):
        note = _read_note(other) if other != folder else None
        if note is not None and note["listing"] == listing and note["engine"] == "tokenizers":
            return Course("tokenizers", note["engine_reason"]), other.name.replace("-of-", "/")
    return Course(), ""


def _merged_already(listed: Plan, plan: Plan, out: Path) -> PrepareResult | None:
    """The dataset in ``out`` if it is the one that this shard would be a part of."""
    manifest = read_manifest(out)
    if manifest is None or manifest["options"] != listed.options or manifest["tokenizer"] != listed.tokenizer_entry:
        return None
    if listed.verify and manifest["share_compared"] < 1:
        return None
    hashes = {entry["name"]: entry["xxh3"] for entry in manifest["inputs"]}
    made_of = [
        entry if "revision" in entry else {"name": entry["name"], "bytes": entry["bytes"]}
        for entry in manifest["inputs"]
        if entry["xxh3"] or "revision" in entry
    ]
    if with_inputs(listed, made_of).fingerprint != listed.fingerprint:
        return None
    if any(hashes[entry["name"]] != entry["xxh3"] for entry in plan.inputs):
        return None
    try:
        check_files(out, manifest)
    except UserError:
        return None
    return result_of(out, manifest, cache_hit=True, seconds=0.0)


# --------------------------------------------------------------------------------------------------------------- merge


def merge_shards(
    sources: Sequence[str | Path] | str | Path,
    *,
    tokenizer: Any,
    out: str | Path,
    progress: Report | None = None,
    **options: Any,
) -> PrepareResult:
    """Makes the dataset ``out`` of all shards that ``prepare_shard`` left beside it, and removes them.

    The dataset has the bytes that ``prepare`` would give. Raises ``UserError`` for a shard that is missing, was made
    from other inputs, with other options or by another version, or was encoded by another engine than the rest.
    """
    started, out = time.perf_counter(), Path(out)
    refuse_foreign(out)
    listed = list_preparation(sources, tokenizer=tokenizer, **options)
    work = _work_folder(out)
    if not work.exists() and read_manifest(out) is not None:  # merged before: whether it is this one, the content tells
        plan = hash_inputs(listed, progress)
        return run_preparation(plan, out, progress=progress, started=started, build=_refuse_other_dataset)
    folders = _folders(work)
    notes = [_read_note(folder) for folder in folders]
    shards = [_StoredShard(folder, note) for folder, note in zip(folders, notes, strict=True) if note is not None]
    _refuse_others(listed, shards)
    if missing := [folder for folder, note in zip(folders, notes, strict=True) if note is None]:
        raise _unfinished(missing)
    _refuse_two_engines(listed, shards)
    plan = with_inputs(listed, _inputs(listed, shards))
    result = run_preparation(plan, out, progress=progress, started=started, build=partial(_assemble, shards))
    shutil.rmtree(work, ignore_errors=True)
    return result


@dataclass(frozen=True)
class _StoredShard:
    folder: Path
    note: dict[str, Any]

    @property
    def name(self) -> str:
        return self.folder.name.replace("-of-", "/")

    @property
    def documents(self) -> int:
        return int(self.note["documents"])


def _folders(work: Path) -> list[Path]:
    """Where the shards lie or should lie, in order."""
    found = [re.fullmatch(r"(\d+)-of-(\d+)", path.name) for path in work.iterdir()] if work.is_dir() else []
    counts = {int(name[2]) for name in found if name is not None}
    if not counts:
        raise UserError(
            f"there is no shard in {work}", "Prepare each with --shard I/N first, with the same --out; then merge."
        )
    if len(counts) > 1:
        raise UserError(
            f"{work} holds shards of {' and of '.join(str(count) for count in sorted(counts))}",
            "Remove the folders of those that aren't wanted, or all of it.",
        )
    return [work / f"{number}-of-{max(counts)}" for number in range(max(counts))]


def _unfinished(missing: list[Path]) -> UserError:
    names = ", ".join(path.name.replace("-of-", "/") for path in missing[:20])
    return UserError(
        f"shard {names} isn't finished: there is no {missing[0] / _NOTE}",
        "Run it (again) with --shard and the same inputs and options, wait for its end, then merge.",
    )


def _refuse_other_dataset(plan: Plan, folder: Path, say: Say) -> tuple[dict[str, Any], int]:
    raise UserError(
        f"no shards lie beside the dataset, which isn't that of these inputs and options: {plan.fingerprint}",
        "Prepare each shard with --shard I/N and the same --out; then merge.",
    )


def _refuse_others(listed: Plan, shards: list[_StoredShard]) -> None:
    """Raises for shards of another preparation, naming both fingerprints."""
    for shard in shards:
        if shard.note["arriero"] != __version__:
            raise UserError(
                f"shard {shard.name} was made by arriero {shard.note['arriero']}, this is {__version__}",
                "Use one version for all shards and the merge.",
            )
        if shard.note["listing"] != listed.fingerprint:
            raise UserError(
                f"shard {shard.name} was made from other inputs, options or tokenizer: its fingerprint is "
                f"{shard.note['listing']}, that of this merge {listed.fingerprint}",
                "Merge with the inputs and options that the shards were made with, or make that shard again.",
            )
        if listed.verify and shard.note["share_compared"] < 1:
            raise UserError(
                f"of shard {shard.name} only {shard.note['share_compared']:.1%} of the text was compared",
                f"Make it again with --verify --shard {shard.name}, or merge without --verify.",
            )


def _refuse_two_engines(listed: Plan, shards: list[_StoredShard]) -> None:
    """gigatoken's ids are not to be trusted where it was found to differ, whichever shard found it."""
    slow = [shard for shard in shards if shard.note["engine"] == "tokenizers"]
    fast = [shard for shard in shards if shard.note["engine"] != "tokenizers"]
    if slow and fast:
        raise UserError(
            f"shard {', '.join(shard.name for shard in slow)} was encoded by tokenizers ({slow[0].note['engine_reason']}), "
            f"shard {', '.join(shard.name for shard in fast)} by gigatoken",
            f"Run the latter again, with --shard {fast[0].name} and so on: they will use tokenizers too.",
        )


def _inputs(listed: Plan, shards: list[_StoredShard]) -> list[dict[str, Any]]:
    """The manifest's entries of all readable files, from what the shards hashed. Raises where a file is another one now.

    A file with the size and time of change that the shard saw is taken for the same; another time, as a copy on this
    machine's own disk may have, makes it be hashed.
    """
    inputs = []
    found: dict[str, tuple[_StoredShard, dict[str, Any], tuple[int, int]]] = {}
    for shard in shards:
        for entry, change in zip(
            shard.note["inputs"], shard.note["modified"], strict=False
        ):  # readable ones come first
            other = found.setdefault(entry["name"], (shard, entry, tuple(change)))
            if other[1]["xxh3"] != entry["xxh3"]:
                raise UserError(
                    f"{entry['name']} had xxh3 {other[1]['xxh3']} for shard {other[0].name} and {entry['xxh3']} for "
                    f"shard {shard.name}: it was changed in between",
                    "Make both shards again.",
                )
    for file, now in zip(listed.files, listed.modified, strict=True):
        shard, entry, change = found[file.name]
        digest = entry["xxh3"] if change == now else hash_file(file.path)
        if digest != entry["xxh3"]:
            raise UserError(
                f"{file.path} was changed since shard {shard.name} was made of it: its xxh3 was {entry['xxh3']} and is "
                f"{digest}",
                f"Make the shard again with --shard {shard.name}.",
            )
        inputs.append({key: value for key, value in entry.items() if key not in ("start", "stop")})
    return inputs


def _assemble(shards: list[_StoredShard], plan: Plan, folder: Path, say: Say) -> tuple[dict[str, Any], int]:
    """Builds the dataset in ``folder`` from its shards; see ``prepare.Build``."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    total = sum(shard.documents for shard in shards)
    with begin(plan, folder, _moved(plan, shards)) as building:
        _join_logs(building.log, shards)
        if not total:
            raise nothing_found(plan, building.log)
        for shard in shards:
            _check_content(shard)
            for documents in _stored_documents(shard, [file.name for file in plan.files]):
                building.add_framed(*documents)
                done = plan.input_bytes * building.accepted // total
                say("merging", done, building.accepted, building.tokens)
            for listed in shard.note["lists"]:
                building.append_list(shard.folder / listed["name"])
        say("writing", plan.input_bytes, building.accepted, building.tokens)
        entries = building.finish()
    notes = [shard.note for shard in shards]
    share = joint_share_compared([note["compared"] for note in notes])
    if notes[0]["engine"] == "tokenizers":
        share = 1.0
    engine = notes[0]["engine"], notes[0]["engine_reason"], share
    return complete(plan, folder, building, entries, engine), 0


def _moved(plan: Plan, shards: list[_StoredShard]) -> dict[int, bool]:
    """What ``moved_across`` says of all documents; of copies the first counts."""
    lowest, highest, first = (1 << 64, 0), (-1, 0), 0
    for shard in shards:
        (low, low_place), (high, high_place) = shard.note["lowest"], shard.note["highest"]
        if low < lowest[0]:
            lowest = low, first + low_place
        if high > highest[0]:
            highest = high, first + high_place
        first += shard.documents
    return moved_across(plan, first, lowest, highest)


def _join_logs(log: ReadLog, shards: list[_StoredShard]) -> None:
    states = [shard.note["log"] for shard in shards]
    skipped: Counter[str] = Counter()
    for state in states:
        skipped.update(state["skipped"])
    examples = [example for state in states for example in state["examples"]][:100]
    log.restore({"skipped": skipped, "replaced": sum(state["replaced"] for state in states), "examples": examples})
    log.fields = dict.fromkeys(field for shard in shards for field in shard.note["fields"])


def _check_content(shard: _StoredShard) -> None:
    """Raises unless every file of the shard is what its machine wrote."""
    infos = [info for split in shard.note["splits"].values() for info in split["shards"]]
    found = [(f"{info['name']}.{kind}", info[f"{kind}_xxh3"]) for info in infos for kind in ("bin", "idx")]
    found += [(entry["name"], entry["xxh3"]) for entry in (*shard.note["tables"], *shard.note["lists"])]
    for name, digest in found:
        path = shard.folder / name
        now = hash_file(path) if path.is_file() else "missing"
        if now != digest:
            raise UserError(
                f"{path} isn't what shard {shard.name} wrote: its xxh3 was {digest} and is {now}",
                f"Remove {shard.folder} and make the shard again with --shard {shard.name}.",
            )


def _stored_documents(
    shard: _StoredShard, names: list[str]
) -> Iterator[tuple[Batch, npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """(documents, ids, lengths), about ``_MERGE_TOKENS`` at once, at least one document; names: the dataset's files."""
    infos = [info for split in shard.note["splits"].values() for info in split["shards"]]
    stream = TokenStream([Shard(shard.folder / info["name"]) for info in infos])
    numbers = {name: number for number, name in enumerate(names)}
    number_of = np.array([numbers[name] for name in shard.note["files"]], dtype=np.int32)
    document = token = 0
    for rows in read_rows(shard.folder / ROWS):
        lengths = stream.document_lengths(document, document + len(rows))
        document += len(rows)
        cuts = np.flatnonzero(np.diff(np.cumsum(lengths) // _MERGE_TOKENS)) + 1
        for piece, sizes in zip(np.split(rows, cuts), np.split(lengths, cuts), strict=True):
            end = token + int(sizes.sum())
            batch = Batch([], number_of[piece["file"]], piece["row"], piece["text_bytes"], piece["xxh3"], [], 0)
            yield batch, stream.read(token, end), sizes
            token = end


# -------------------------------------------------------------------------------------------------------------- result


def _result(folder: Path, note: dict[str, Any], *, cache_hit: bool, seconds: float, found: int = 0) -> PrepareResult:
    log = note["log"]
    return PrepareResult(
        path=folder,
        fingerprint=note["listing"],
        cache_hit=cache_hit,
        documents=note["documents"],
        validation_documents=0,
        tokens=note["tokens"],
        text_bytes=note["text_bytes"],
        skipped=sum(log["skipped"].values()),
        skipped_reasons=log["skipped"],
        replaced=log["replaced"],
        engine=note["engine"],
        share_compared=note["share_compared"],
        add_bos=note["add_bos"],
        seconds=seconds,
        mb_per_s=0.0 if cache_hit else (note["text_bytes"] - found) / 1e6 / seconds,
    )
