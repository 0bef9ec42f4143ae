from __future__ import annotations

import pytest
from workshop import Workshop, arriero, write_corpus


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    folder = tmp_path_factory.mktemp("workshop")
    made = Workshop(folder, folder / "code.jsonl", folder / "tokenizer", folder / "code")
    write_corpus(made.corpus, 2_000_000)
    arriero("tokenizer", "train", made.corpus, "--vocab-size", 1024, "--out", made.tokenizer)
    arriero("prepare", made.corpus, "--tokenizer", made.tokenizer, "--out", made.dataset, "--validation-split", 0.05)
    return made
