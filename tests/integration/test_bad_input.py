"""What doesn't fit together is refused before anything starts, with the values and what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from workshop import Workshop, arriero

from arriero.config.load import load_recipe
from arriero.errors import UserError
from arriero.resolve import resolve


def refusal(recipe: Path, *overrides: str, dp: int = 1) -> str:
    with pytest.raises(UserError) as error:
        resolve(load_recipe(recipe, overrides), dp)
    assert error.value.exit_code == 2
    assert error.value.remedy
    return str(error.value)


@pytest.fixture(scope="module")
def recipe(workshop: Workshop) -> Path:
    return workshop.recipe("bad")


def test_the_recipe_itself_is_fine(recipe: Path) -> None:
    assert resolve(load_recipe(recipe), 2).plan.steps == 12


def test_missing_source(recipe: Path) -> None:
    assert "there is no dataset at /nowhere" in refusal(recipe, "data.sources.0.path=/nowhere")


def test_dataset_smaller_than_one_row(recipe: Path) -> None:
    text = refusal(recipe, "data.seq_len=9000000")
    assert "less than one row of data.seq_len 9,000,000" in text


def test_vocabulary_larger_than_the_model(recipe: Path) -> None:
    text = refusal(recipe, "model.config.vocab_size=1000")
    assert "the tokenizer has 1,024 tokens, the model only 1,000 embeddings" in text
    assert "resize" in text


def test_global_batch_that_does_not_divide(recipe: Path) -> None:
    text = refusal(recipe, "train.global_batch_size=10", dp=2)
    assert "global_batch_size 10 = per_device_train_batch_size 2 × accumulation × 2" in text
    assert "8 or 12" in text


def test_rows_beyond_the_models_positions(recipe: Path) -> None:
    text = refusal(recipe, "model.config.max_position_embeddings=64")
    assert "data.seq_len 128 is beyond the model's max_position_embeddings 64" in text


def test_sources_that_end_before_the_run(recipe: Path) -> None:
    text = refusal(recipe, "train.max_steps=100000", "data.sources.0.max_epochs=2")
    assert "code: 2 epochs" in text


def test_dataset_of_another_tokenizer(workshop: Workshop, recipe: Path, tmp_path: Path) -> None:
    arriero("tokenizer", "train", workshop.corpus, "--vocab-size", 512, "--out", tmp_path / "other")
    text = refusal(recipe, f"model.tokenizer={tmp_path / 'other'}")
    from arriero.data.shards import open_dataset
    from arriero.data.tokenizer import load_tokenizer, tokenizer_fingerprint

    assert str(open_dataset(workshop.dataset).tokenizer_fingerprint) in text
    assert tokenizer_fingerprint(load_tokenizer(tmp_path / "other")) in text


def test_tokenizer_without_eos(workshop: Workshop, recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "endless"
    shutil.copytree(workshop.tokenizer, folder)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = folder / name
        if path.is_file():
            settings = json.loads(path.read_text())
            settings.pop("eos_token", None)
            path.write_text(json.dumps(settings))
    assert "EOS" in refusal(recipe, f"model.tokenizer={folder}")


@pytest.mark.parametrize("cut", [".bin", ".idx"])
def test_truncated_dataset(workshop: Workshop, recipe: Path, tmp_path: Path, cut: str) -> None:
    copy = tmp_path / "code"
    shutil.copytree(workshop.dataset, copy)
    (victim,) = copy.glob(f"train-*{cut}")
    victim.write_bytes(victim.read_bytes()[:-1])
    text = refusal(recipe, f"data.sources.0.path={copy}")
    assert victim.name in text
    assert f"{victim.stat().st_size + 1:,}" in text.replace(" ", "") or str(victim.stat().st_size + 1) in text


@pytest.mark.parametrize("value", ["1", "1.5", "-0.1", "yes", "much"])
def test_nonsense_validation_split(recipe: Path, value: str) -> None:
    with pytest.raises(UserError, match=r"data\.validation_split"):
        load_recipe(recipe, [f"data.validation_split={value}"])


def test_no_validation_means_no_evaluation(workshop: Workshop, tmp_path: Path) -> None:
    done = arriero(
        "prepare", workshop.corpus, "--tokenizer", workshop.tokenizer, "--out", tmp_path / "all",
        "--validation-split", 0, "--json",
    )  # fmt: skip
    assert json.loads(done.stdout)["validation_documents"] == 0
    recipe = workshop.recipe("no-eval", data={"sources": [{"path": str(tmp_path / "all")}], "seq_len": 128})
    (source,) = resolve(load_recipe(recipe, ["data.validation_split=0"]), 1).sources
    assert source.validation is None
    # Without a part of its own, a share of the documents is held out when the run begins.
    (split,) = resolve(load_recipe(recipe, ["data.validation_split=0.05"]), 1).sources
    assert split.validation is not None
    assert 0 < split.validation.stream.documents < split.training.stream.documents
    total = source.training.stream.documents
    assert split.validation.stream.documents + split.training.stream.documents == total


def test_a_dataset_that_changed_under_a_run_is_refused_by_name(workshop: Workshop, tmp_path: Path) -> None:
    dataset = tmp_path / "data"
    prepare = ("prepare", "--tokenizer", workshop.tokenizer, "--out", dataset, "--validation-split", 0.05)
    arriero(*prepare, workshop.corpus)
    recipe = workshop.recipe(
        "changing", data={"sources": [{"path": str(dataset), "name": "prose"}], "seq_len": 128}, train={"max_steps": 2}
    )
    arriero("train", recipe)
    shorter = tmp_path / "shorter.jsonl"
    shorter.write_text("".join(workshop.corpus.read_text().splitlines(keepends=True)[:-3]))
    arriero(*prepare, shorter)
    done = arriero("train", recipe, "train.max_steps=4", check=False)
    assert done.returncode == 2
    assert "the dataset 'prose' has changed since the checkpoint was written: fingerprint" in done.stderr


def test_fp16_on_a_processor_is_refused(workshop: Workshop) -> None:
    import torch

    if torch.cuda.is_available() or torch.ops.mkldnn._is_mkldnn_fp16_supported():
        pytest.skip("this machine can compute in fp16")
    done = arriero("train", workshop.recipe("fp16"), "train.precision=fp16", check=False)
    assert done.returncode == 2
    assert "fp16 isn't supported" in done.stderr
    assert "bf16" in done.stderr
