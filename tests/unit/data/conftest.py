"""Real tokenizers for the data tests, trained once per session on a few sentences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from arriero.data.tokenizer import load_tokenizer, train_tokenizer

TEXTS = [
    "The arriero loads the mule before dawn, and the mule knows the road better than he does.\n",
    "def load(mule, kilograms=80):\n    if kilograms > 120:\n        raise ValueError('too heavy')\n    return mule + 1\n",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. 12345 67,89 %\n\n\n",
    "赶骡人在黎明前装好货物，骡子比他更熟悉这条路。\n",
    "x = [1, 2, 3]\nfor  y  in  x:\n\tprint(y)\r\n",
]


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer of 400 tokens."""
    out = tmp_path_factory.mktemp("tokenizer") / "bpe"
    train_tokenizer(TEXTS * 3, 400, out)
    return out


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Any:
    return load_tokenizer(tokenizer_folder)
