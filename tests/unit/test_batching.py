"""Requests that share one decode: each gets what it would get alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_model import CONTEXT, make_model
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from arriero.errors import UserError
from arriero.inference.batching import Batcher, QueueFull
from arriero.inference.generate import generate, load_for_generation
from arriero.inference.rows import Piece, Row, Text
from arriero.inference.sampling import Ask, Sampling, choose

PROMPTS = ["import os", "def ", "class A:\n    def f(self):\n        return 1", "x", "for i in range(10):\n", "赶骡人"]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    return load_for_generation(make_model(tmp_path_factory.mktemp("model") / "small"), device="cpu")


@pytest.fixture
def batcher(loaded: tuple[Any, Any]) -> Iterator[Batcher]:
    made = Batcher(*loaded, max_rows=4, max_waiting=8)
    yield made
    made.close(finish=False)


class Heard:
    """What was said to one request, and its end."""

    def __init__(self) -> None:
        self.pieces: dict[int, list[Piece]] = {}
        self._ended = threading.Semaphore(0)

    def __call__(self, number: int, piece: Piece) -> None:
        self.pieces.setdefault(number, []).append(piece)
        if piece.finish_reason:
            self._ended.release()

    def wait(self, rows: int = 1) -> Heard:
        for _ in range(rows):
            assert self._ended.acquire(timeout=60)
        return self

    def text(self, number: int = 0) -> str:
        return "".join(piece.text for piece in self.pieces[number])

    def last(self, number: int = 0) -> Piece:
        return self.pieces[number][-1]


def said(batcher: Batcher, prompt: str, **sampling: Any) -> tuple[str, Piece]:
    heard = Heard()
    batcher.submit([batcher.ask(prompt, Sampling(**sampling))], heard)
    heard.wait()
    return heard.text(), heard.last()


def chosen(logits: torch.Tensor, row: Row) -> int:
    return choose(logits, row.ask, row.ids, [], row.random)


def test_rows_that_join_and_leave_say_what_they_say_alone(loaded: tuple[Any, Any], batcher: Batcher) -> None:
    wanted = [Sampling(max_new_tokens=12 + 5 * n, temperature=0) for n in range(len(PROMPTS))]
    alone = [generate(*loaded, prompt, one) for prompt, one in zip(PROMPTS, wanted, strict=True)]
    heard = [Heard() for _ in PROMPTS]
    for prompt, one, ear in zip(PROMPTS, wanted, heard, strict=True):
        batcher.submit([batcher.ask(prompt, one)], ear)
        time.sleep(0.01)  # six requests for four places, at different moments
    for ear, expected in zip(heard, alone, strict=True):
        ear.wait()
        last = ear.last()
        assert (ear.text(), last.tokens, last.finish_reason) == (expected.text, expected.tokens, expected.finish_reason)
    assert batcher.running == batcher.waiting == 0
    assert len({one.text for one in alone}) == len(alone)


def test_pieces_are_whole_characters(loaded: tuple[Any, Any]) -> None:
    """Tokens that end within a character wait for the rest of it; what never becomes one comes as it is."""
    _, tokenizer = loaded
    for text in ("Zwölf 🫏🫏 赶骡人在 é", "a\U0001f9ffb"):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        spoken = Text(tokenizer, Ask([tokenizer.bos_token_id], Sampling()))
        pieces = [spoken.add(token)[0] for token in ids]
        assert not any("�" in piece for piece in pieces)
        assert "".join(pieces) + spoken.rest() == text
    lone = tokenizer("🧿", add_special_tokens=False).input_ids[:2]
    spoken = Text(tokenizer, Ask([tokenizer.bos_token_id], Sampling()))
    assert [spoken.add(token)[0] for token in lone] == ["", ""]
    assert "�" in spoken.rest()


def test_a_stop_string_ends_it_wherever_tokens_split(batcher: Batcher) -> None:
    whole, last = said(batcher, "import os", max_new_tokens=60, temperature=0)
    assert last.finish_reason == "length"
    for place in (3, 10, 20):
        stop = whole[place : place + 4]
        text, last = said(batcher, "import os", max_new_tokens=60, temperature=0, stop=("never said", stop))
        assert text == whole[: whole.index(stop)]
        assert last.finish_reason == "stop"
    # A beginning of a stop string at the very end is said after all.
    text, _ = said(batcher, "import os", max_new_tokens=60, temperature=0, stop=(whole[-2:] + "not this",))
    assert text == whole


def test_a_seed_gives_the_same_text_whatever_runs_beside_it(batcher: Batcher) -> None:
    first, _ = said(batcher, "x", max_new_tokens=20, seed=11)
    heard, noise = Heard(), Heard()
    batcher.submit([batcher.ask(PROMPTS[2], Sampling(max_new_tokens=40)) for _ in range(3)], noise)
    batcher.submit([batcher.ask("x", Sampling(max_new_tokens=20, seed=11))], heard)
    assert heard.wait().text() == first
    noise.wait(3)
    assert len({noise.text(number) for number in range(3)}) == 3, "without a seed each is its own"
    assert said(batcher, "x", max_new_tokens=20, seed=12)[0] != first


def test_choices_have_the_probabilities_of_transformers_processors(batcher: Batcher) -> None:
    sampling = Sampling(temperature=0.7, top_k=12, top_p=0.8, repetition_penalty=1.3, seed=1)
    ids = [3, 5, 7]
    row = Row(0, batcher.ask(ids, sampling), batcher.vocabulary, lambda *_: None)
    torch.manual_seed(2)
    logits = torch.randn(40) * 2
    expected = logits[None].clone()
    for processor in (
        RepetitionPenaltyLogitsProcessor(1.3), TemperatureLogitsWarper(0.7), TopKLogitsWarper(12), TopPLogitsWarper(0.8),
    ):  # fmt: skip
        expected = processor(torch.tensor([ids]), expected)
    wanted = expected[0].softmax(-1)
    draws = torch.tensor([chosen(logits.clone(), row) for _ in range(4000)])
    seen = draws.bincount(minlength=40) / 4000
    assert set(draws.tolist()) == set(wanted.nonzero().flatten().tolist())
    # Four standard deviations of a share of 4,000 draws.
    assert bool(((seen - wanted).abs() <= 4 * (wanted * (1 - wanted) / 4000).sqrt() + 1e-9).all())


def test_penalties_count_what_was_generated(batcher: Batcher) -> None:
    row = Row(0, batcher.ask([1], Sampling(temperature=0), presence=1.5, frequency=0.5), batcher.vocabulary, print)
    row.ids += [2, 2, 3]
    logits = torch.zeros(6)
    logits[2] = 2.4  # less 1.5 and two times 0.5
    logits[3] = 1.9  # less 1.5 and 0.5
    logits[4] = -0.05
    assert chosen(logits.clone(), row) == 0
    logits[2] = 2.6
    assert chosen(logits.clone(), row) == 2


def test_end_of_text_ends_it_unless_ignored(loaded: tuple[Any, Any], batcher: Batcher) -> None:
    free, _ = said(batcher, "import os", max_new_tokens=1, temperature=0)
    token = loaded[1](free, add_special_tokens=False).input_ids[0]
    saved = batcher.vocabulary.eos
    try:
        batcher.vocabulary.eos = [token]
        text, last = said(batcher, "import os", max_new_tokens=30, temperature=0)
        assert (text, last.finish_reason, last.tokens) == ("", "stop", 1)
        text, last = said(batcher, "import os", max_new_tokens=30, temperature=0, ignore_eos=True)
        assert (last.finish_reason, last.tokens) == ("length", 30)
    finally:
        batcher.vocabulary.eos = saved


def test_one_that_nobody_wants_leaves(batcher: Batcher) -> None:
    heard = Heard()
    rows = batcher.submit([batcher.ask("x", Sampling(max_new_tokens=150, temperature=0)) for _ in range(6)], heard)
    rows[5].cancel()  # still waiting
    rows[0].cancel()
    heard.wait(6)
    assert heard.last(0).finish_reason == heard.last(5).finish_reason == "cancelled"
    assert heard.last(0).tokens < 150
    assert {heard.last(number).finish_reason for number in range(1, 5)} == {"length"}


def test_no_more_may_wait_than_allowed(batcher: Batcher) -> None:
    heard = Heard()
    many = [batcher.ask("x", Sampling(max_new_tokens=40))] * 13
    with pytest.raises(QueueFull):
        batcher.submit(many, heard)
    assert not heard.pieces, "all or none"
    batcher.submit(many[:12], heard)
    with pytest.raises(QueueFull):
        batcher.submit(many[:9], heard)
    heard.wait(12)


def test_a_fault_ends_its_requests_and_not_the_server(batcher: Batcher, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Heard()

    def broken(*_: Any) -> int:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr("arriero.inference.rows.choose", broken)
        batcher.submit([batcher.ask("x", Sampling(max_new_tokens=5))], heard)
        assert heard.wait().last().finish_reason == "error"
    assert said(batcher, "x", max_new_tokens=5, ignore_eos=True)[1].tokens == 5

    def broken_for_seven(logits: torch.Tensor, ask: Ask, said: list[int], *rest: Any) -> int:
        if ask.sampling.seed == 7 and len(said) == 3:
            raise RuntimeError("probabilities that are none")
        return choose(logits, ask, said, *rest)

    monkeypatch.setattr("arriero.inference.rows.choose", broken_for_seven)
    heard = Heard()
    batcher.submit([batcher.ask("x", Sampling(max_new_tokens=20, seed=seed)) for seed in (6, 7, 8)], heard)
    heard.wait(3)
    assert [heard.last(number).finish_reason for number in range(3)] == ["length", "error", "length"]
    assert batcher.alive


def test_closing_answers_what_was_queued(loaded: tuple[Any, Any]) -> None:
    made, heard = Batcher(*loaded, max_rows=2), Heard()
    made.submit([made.ask("x", Sampling(max_new_tokens=20, ignore_eos=True))] * 5, heard)
    made.close()
    assert [heard.last(number).tokens for number in range(5)] == [20] * 5
    with pytest.raises(QueueFull):
        made.submit([made.ask("x", Sampling())], heard)


def test_prompts_that_cannot_be_answered(batcher: Batcher) -> None:
    with pytest.raises(UserError, match=f"the model's context is {CONTEXT}"):
        batcher.ask("x " * CONTEXT, Sampling())
    with pytest.raises(UserError, match="token id 512 is not in the model's vocabulary of 512"):
        batcher.ask([3, 512], Sampling())
    with pytest.raises(UserError, match="no tokens"):
        batcher.ask([], Sampling())
    # A prompt that fills the context but for one place gets one token.
    heard = Heard()
    batcher.submit([batcher.ask([3] * (CONTEXT - 1), Sampling(max_new_tokens=9))], heard)
    assert (heard.wait().last().tokens, heard.last().finish_reason) == (1, "length")


def test_one_bos_with_a_template_and_without(loaded: tuple[Any, Any], batcher: Batcher, tmp_path: Path) -> None:
    from small_model import TEMPLATE

    from arriero.inference.chat import render

    _, tokenizer = loaded
    plain = batcher.ask("x", Sampling()).ids
    tokenizer.chat_template = TEMPLATE
    try:
        text = render(tokenizer, [{"role": "user", "content": "x"}])
        chat = batcher.ask(text, Sampling(), special=False).ids
        with pytest.raises(UserError, match="refuses this conversation: a system text comes first"):
            render(tokenizer, [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}])
    finally:
        tokenizer.chat_template = None
    for ids in (plain, chat):
        assert ids.count(tokenizer.bos_token_id) == 1
        assert ids[0] == tokenizer.bos_token_id
