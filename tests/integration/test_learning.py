"""A model learns the next token and not the one after it, and its text says so."""

from __future__ import annotations

import json
from pathlib import Path

from workshop import Workshop, arriero, metrics


def word_tokenizer(folder: Path, words: int) -> None:
    """Token id = the number in the word, so that rows can be read as they are."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"w{number}": number for number in range(words)} | {"</s>": words, "<unk>": words + 1}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>").save_pretrained(folder)


def test_it_learns_the_next_token(workshop: Workshop, tmp_path: Path) -> None:
    word_tokenizer(tmp_path / "words", 50)
    counting = " ".join(f"w{number}" for number in range(50))
    corpus = tmp_path / "counting.jsonl"
    corpus.write_text("".join(json.dumps({"text": f"{counting} {counting}"}) + "\n" for _ in range(40)))
    prepared = arriero(
        "prepare", corpus, "--tokenizer", tmp_path / "words", "--out", tmp_path / "counting",
        "--validation-split", 0, "--json",
    )  # fmt: skip
    assert json.loads(prepared.stdout)["engine"] == "tokenizers"  # no byte-level BPE: said, not hidden
    recipe = workshop.recipe(
        "counting",
        model={"tokenizer": str(tmp_path / "words")},
        data={"sources": [{"path": str(tmp_path / "counting")}], "seq_len": 64, "validation_split": 0},
        train={"max_steps": 150, "global_batch_size": 8, "per_device_train_batch_size": 8},
        optim={"learning_rate": 3e-3, "warmup_steps": 10},
        checkpoint={"save_steps": 1000},
    )
    arriero("train", recipe)
    assert [row["loss"] for row in metrics(workshop.run("counting")) if "loss" in row][-1] < 0.15
    done = arriero(
        "generate",
        workshop.run("counting"),
        "--prompt",
        "w5 w6 w7",
        "--max-new-tokens",
        4,
        "--temperature",
        0,
        "--json",
    )
    assert json.loads(done.stdout)["text"].split() == ["w8", "w9", "w10", "w11"]


def test_a_space_at_the_prompts_end_is_joined_with_what_follows(workshop: Workshop) -> None:
    """Tokens hold a word with the space before it; a prompt that ends in a space must not break that."""
    from arriero.inference.generate import generate, load_for_generation
    from arriero.inference.sampling import Sampling

    recipe = workshop.recipe("spaces", train={"max_steps": 2}, checkpoint={"save_steps": 100})
    arriero("train", recipe)
    model, tokenizer = load_for_generation(workshop.run("spaces") / "final")
    greedy = Sampling(max_new_tokens=6, temperature=0.0, ignore_eos=True)
    pieces: list[str] = []
    healed = generate(model, tokenizer, "import os, ", greedy, on_text=pieces.append)
    assert "".join(pieces) == healed.text
    assert not healed.text.startswith(" ")
    ids = tokenizer("import os, " + healed.text).input_ids
    assert tokenizer.convert_tokens_to_ids("\u0120") not in ids[: len(tokenizer("import os,").input_ids) + 1]
    # Without a space at its end nothing is held back.
    plain = generate(model, tokenizer, "import os,", greedy)
    assert plain.tokens == 6
