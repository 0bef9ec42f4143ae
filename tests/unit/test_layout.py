"""Checkpoints on disk: what makes one whole, which is the newest, which may go."""

from __future__ import annotations

import random
import re
import shutil
from pathlib import Path

import numpy as np
import orjson
import pytest
from safetensors.numpy import save_file

from arriero.checkpoint.layout import (
    FORMAT_VERSION,
    MANIFEST,
    best_checkpoint,
    file_entry,
    folder_name,
    list_checkpoints,
    manifest_hash,
    newest_intact,
    prune,
    read_manifest,
    step_of,
    verify,
)
from arriero.disk import hash_file
from arriero.errors import UserError


def write_checkpoint(run: Path, step: int, evaluation: dict[str, float] | None = None) -> Path:
    """A small one, written as the real ones are: files, then their manifest with its own hash."""
    path = run / folder_name(step)
    path.mkdir(parents=True)
    save_file({"w/master": np.arange(step, step + 8, dtype=np.float32)}, path / "state-00000.safetensors")
    (path / "trainer_state.json").write_bytes(
        orjson.dumps({"step": step} | ({"evaluation": evaluation} if evaluation else {}))
    )
    body = {
        "format_version": FORMAT_VERSION,
        "step": step,
        "world_size": 1,
        "parameters": {"w": {"shape": [8], "slices": [{"file": "state-00000.safetensors", "start": 0, "stop": 8}]}},
        "files": {file.name: file_entry(file) for file in sorted(path.iterdir())},
    }
    (path / MANIFEST).write_bytes(orjson.dumps(body | {"xxh3": manifest_hash(body)}, option=orjson.OPT_INDENT_2))
    return path


def reason(path: Path) -> str:
    verdict = verify(path)
    assert not verdict.intact
    assert (verdict.path, verdict.step) == (path, step_of(path))
    assert verdict.reason is not None
    return verdict.reason


def test_a_whole_checkpoint(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 500)
    verdict = verify(path)
    assert (verdict.path, verdict.step, verdict.reason, verdict.intact) == (path, 500, None, True)
    assert read_manifest(path)["step"] == 500


def test_names(tmp_path: Path) -> None:
    assert folder_name(7) == "checkpoint-7"
    assert step_of(Path("runs/x/checkpoint-1200")) == 1200
    with pytest.raises(UserError, match="is not named as a checkpoint is"):
        step_of(Path("runs/x/final"))
    for name in (
        "checkpoint-10",
        "checkpoint-9",
        "checkpoint-100",
        "tmp-checkpoint-11",
        "checkpoint-x",
        "checkpoint-1a",
    ):
        (tmp_path / name).mkdir()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-9", "checkpoint-10", "checkpoint-100"]
    assert list_checkpoints(tmp_path / "nowhere") == []


def test_what_is_missing_or_cut_is_named(tmp_path: Path) -> None:
    empty = tmp_path / "checkpoint-1"
    empty.mkdir()
    assert reason(empty) == "it has no manifest.json: it was never completed"

    path = write_checkpoint(tmp_path, 2)
    file = path / "state-00000.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    assert reason(path) == f"state-00000.safetensors has {len(content) - 1} bytes, expected {len(content)}"
    file.write_bytes(content + b"\0")
    assert reason(path) == f"state-00000.safetensors has {len(content) + 1} bytes, expected {len(content)}"
    file.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    assert reason(path) == "state-00000.safetensors doesn't match its hash"
    assert verify(path, content=False).intact, "by size alone it is whole"
    file.unlink()
    assert reason(path) == "state-00000.safetensors is missing"
    file.write_bytes(content)
    assert verify(path).intact


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "manifest.json is damaged"),
        (b'{"format_version": 1, "files": {}', "manifest.json is damaged"),
        (b"\xff\xfe", "manifest.json is damaged"),
        (b"[]", "manifest.json is not of format 1"),
        (b'{"format_version": 2}', "manifest.json is not of format 1"),
        (b'{"format_version": 1, "files": {}}', "manifest.json doesn't match its own hash"),
    ],
)
def test_manifests_that_are_none(tmp_path: Path, content: bytes, expected: str) -> None:
    path = write_checkpoint(tmp_path, 1)
    (path / MANIFEST).write_bytes(content)
    assert reason(path).startswith(expected)


def test_any_flipped_bit_is_noticed(tmp_path: Path) -> None:
    """Every bit of the manifest and of the other files, one at a time."""
    path = write_checkpoint(tmp_path, 3)
    for file in sorted(path.iterdir()):
        content = bytearray(file.read_bytes())
        for place in range(len(content)):
            for bit in range(8):
                content[place] ^= 1 << bit
                file.write_bytes(content)
                assert not verify(path).intact, f"{file.name}: byte {place}, bit {bit}"
                content[place] ^= 1 << bit
        file.write_bytes(content)
    assert verify(path).intact


def test_hashes_do_not_depend_on_how_a_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x"
    file.write_bytes(random.Random(0).randbytes(1000))
    whole = hash_file(file)
    assert len(whole) == 32
    monkeypatch.setattr("arriero.disk._CHUNK", 7)
    assert hash_file(file) == whole


# ----------------------------------------------------------------------------------------------------------------- newest


def test_the_newest_intact_one_is_found_and_the_others_explained(tmp_path: Path) -> None:
    assert newest_intact(tmp_path) == (None, [])
    for step in (9, 10, 100, 1000):
        write_checkpoint(tmp_path, step)
    assert newest_intact(tmp_path) == (tmp_path / "checkpoint-1000", [])
    (tmp_path / "checkpoint-1000" / MANIFEST).unlink()
    (tmp_path / "checkpoint-100" / "trainer_state.json").write_bytes(b"{}")
    found, passed_over = newest_intact(tmp_path)
    assert found == tmp_path / "checkpoint-10"
    assert [(verdict.step, verdict.reason) for verdict in passed_over] == [
        (1000, "it has no manifest.json: it was never completed"),
        (100, "trainer_state.json has 2 bytes, expected 12"),
    ]
    for step in (9, 10):
        shutil.rmtree(tmp_path / folder_name(step))
    found, passed_over = newest_intact(tmp_path)
    assert found is None
    assert [verdict.step for verdict in passed_over] == [1000, 100]


# ------------------------------------------------------------------------------------------------------------------ prune


def steps_in(run: Path) -> list[int]:
    return [step_of(path) for path in list_checkpoints(run)]


@pytest.mark.parametrize(
    ("keep", "left"), [(None, [2, 10, 30, 200]), (5, [2, 10, 30, 200]), (3, [10, 30, 200]), (1, [200])]
)
def test_prune_keeps_the_newest(tmp_path: Path, keep: int | None, left: list[int]) -> None:
    for step in (2, 10, 30, 200):
        write_checkpoint(tmp_path, step)
    gone = prune(tmp_path, keep)
    assert steps_in(tmp_path) == left
    assert [step_of(path) for path in gone] == [step for step in (2, 10, 30, 200) if step not in left]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(folder_name(step) for step in left)


def test_prune_neither_counts_nor_removes_broken_ones(tmp_path: Path) -> None:
    """With a limit of 1 the only whole checkpoint stays, though newer broken ones lie beside it."""
    for step in (10, 20, 30, 40):
        write_checkpoint(tmp_path, step)
    (tmp_path / "checkpoint-20" / MANIFEST).unlink()
    (tmp_path / "checkpoint-30" / "trainer_state.json").unlink()
    file = tmp_path / "checkpoint-40" / "state-00000.safetensors"
    file.write_bytes(file.read_bytes()[:10])
    assert prune(tmp_path, 1) == []
    assert steps_in(tmp_path) == [10, 20, 30, 40]
    write_checkpoint(tmp_path, 50)
    assert [step_of(path) for path in prune(tmp_path, 1)] == [10]
    assert steps_in(tmp_path) == [20, 30, 40, 50]


def test_prune_keeps_the_best_where_that_is_asked_for(tmp_path: Path) -> None:
    """By the evaluation of its own step: that of an earlier step, which a stop leaves behind, isn't its own."""
    for step, loss, at in (
        (10, 3.0, 10),
        (20, 2.0, 20),
        (25, 1.0, 20),
        (30, 2.0, 30),
        (40, float("nan"), 40),
        (50, 4.0, 50),
    ):
        write_checkpoint(tmp_path, step, {"eval_loss": loss, "eval_step": at})
    write_checkpoint(tmp_path, 60)
    assert best_checkpoint(tmp_path) == tmp_path / "checkpoint-30", "the newer of two that are equally good"
    assert [step_of(path) for path in prune(tmp_path, 2, keep_best=True)] == [10, 20, 25, 40]
    assert steps_in(tmp_path) == [30, 50, 60]
    assert prune(tmp_path, 3, keep_best=True) == []
    assert [step_of(path) for path in prune(tmp_path, 2)] == [30]
    assert best_checkpoint(tmp_path / "nowhere") is None


def test_a_prune_that_was_cut_short_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        write_checkpoint(tmp_path, step)

    def crash(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", crash)
    with pytest.raises(KeyboardInterrupt):
        prune(tmp_path, 1)
    assert steps_in(tmp_path) == [2]
    left = [path.name for path in tmp_path.iterdir() if not re.fullmatch(r"checkpoint-\d+", path.name)]
    assert left == ["tmp-checkpoint-1"], "a name that the next save clears"


def test_a_disk_without_room_for_one_checkpoint_is_said_before_the_first(tmp_path: Path) -> None:
    import shutil

    from arriero.checkpoint.layout import check_space

    check_space(tmp_path, 1000)
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(UserError, match=r"one checkpoint takes .* \(12 bytes for each of"):
        check_space(tmp_path, free // 6)
