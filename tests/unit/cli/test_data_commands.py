from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from arriero.cli.data_commands import data_stats, prepare_command, tokenizer_train
from arriero.errors import UserError

app = typer.Typer()
app.command("train")(tokenizer_train)
app.command("prepare")(prepare_command)
app.command("stats")(data_stats)


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    lines = [
        json.dumps({"body": f"Story {number}: the mule carries {number} sacks over the pass."}) for number in range(50)
    ]
    (folder / "a.jsonl").write_text("\n".join([*lines, '{"body": ""}']))
    said = run("train", folder / "a.jsonl", "--vocab-size", 300, "--out", folder / "tok", "--text-field", "body")
    assert "300 tokens, learnt from 50 documents" in said
    assert "1 skipped: 1 × empty" in said
    return folder


def test_prepare_says_what_it_made(folder: Path) -> None:
    command = ("prepare", folder / "a.jsonl", "--tokenizer", folder / "tok", "--out", folder / "out")
    said = run(*command, "--text-field", "body")
    assert "50 documents (1 held out)" in said
    assert "engine gigatoken, 100.0% of the text compared" in said
    assert "a document is stored as <|begin_of_text|> Story 1: the mule" in said  # 0 is held out
    assert "… <|end_of_text|>" in said
    assert "1 skipped: 1 × empty" in said
    result = json.loads(run(*command, "--text-field", "body", "--json"))
    assert set(result) >= {
        "documents",
        "tokens",
        "skipped",
        "seconds",
        "mb_per_s",
        "engine",
        "cache_hit",
        "fingerprint",
    }
    assert (result["documents"], result["skipped"], result["cache_hit"]) == (50, 1, True)
    assert "there already: nothing was done" in run(*command, "--text-field", "body")
    with pytest.raises(UserError, match="the fields are body"):
        run(*command)


def test_options_reach_the_preparation(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n--\ntwo\n--\n\udcff", errors="surrogateescape")
    options = ["--document-separator", r"\n--\n", "--validation-split", 0, "--no-add-bos", "--on-bad-input", "skip"]
    command = ["prepare", tmp_path / "a.txt", "--tokenizer", folder / "tok", "--out", tmp_path / "out", *options]
    result = json.loads(run(*command, "--json"))
    assert (result["documents"], result["validation_documents"], result["add_bos"]) == (2, 0, False)
    assert result["skipped_reasons"] == {"invalid UTF-8": 1}
    assert "stored as one <|end_of_text|>" in run(*command)


def test_a_limit_takes_text_from_all_over(folder: Path, tmp_path: Path) -> None:
    options = ("--text-field", "body", "--max-megabytes", 0.002)
    said = run("train", folder / "a.jsonl", "--vocab-size", 280, "--out", tmp_path / "tok", *options)
    assert "learnt from 2" in said  # about half of the 50 documents


def test_stats_are_text_or_json(folder: Path, tmp_path: Path) -> None:
    command = ("prepare", folder / "a.jsonl", "--tokenizer", folder / "tok", "--out", tmp_path / "out")
    run(*command, "--text-field", "body", "--validation-split", 0)
    said = run("stats", tmp_path / "out", "--longest", 2)
    assert said.startswith("train: 50 documents, ")
    assert "0 documents (0.0%) are copies" in said
    assert said.count("a.jsonl row ") == 2
    found = json.loads(run("stats", tmp_path / "out", "--json"))["train"]
    assert found["documents"] == sum(part["documents"] for part in found["histogram"]) == 50
    assert f"longest {found['longest']}" in said


def test_shards_and_their_merge(folder: Path) -> None:
    command = ("prepare", folder / "a.jsonl", "--tokenizer", folder / "tok", "--text-field", "body", "--out")
    for number in range(3):
        said = run(*command, folder / "shared", "--shard", f"{number}/3")
        assert "a shard: when all are there, the same command with --merge makes the dataset" in said
    assert json.loads(run(*command, folder / "shared", "--shard", "0/3", "--json"))["cache_hit"]
    said = run(*command, folder / "shared", "--merge")
    assert "50 documents (1 held out)" in said
    run(*command, folder / "alone")
    for path in (folder / "alone").iterdir():
        assert path.read_bytes() == (folder / "shared" / path.name).read_bytes()
    with pytest.raises(UserError, match="--shard and --merge are two steps"):
        run(*command, folder / "shared", "--merge", "--shard", "0/3")


def test_an_empty_shard_is_told(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    said = run("prepare", tmp_path, "--tokenizer", folder / "tok", "--out", tmp_path / "out", "--shard", "1/2")
    assert "0 documents" in said


def test_training_a_tokenizer_shows_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("arriero.cli.data_commands._PLAIN_EVERY_S", 0.0)
    monkeypatch.setattr("arriero.cli.data_commands._AGAIN_EVERY_S", 0.01)
    texts = [" ".join(f"{number * place % 9973:x}" for place in range(2000)) for number in range(1, 60)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer_train([str(tmp_path / "a.jsonl")], 3000, tmp_path / "tok", max_megabytes=10)
    said = capsys.readouterr().err.splitlines()
    reading = [line for line in said if line.startswith("reading: ")]
    assert len(reading) == 59
    assert re.search(r"^reading: (9\d|100)% \d+ MB/s, .* left$", reading[-1])
    merging = said[len(reading) :]
    assert len(merging) > 2  # said again while it works
    assert all(re.search(r"^merging: 59 documents \(\d+.* KiB\), [\d.]+ s$", line) for line in merging), merging
