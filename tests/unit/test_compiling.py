"""When `torch_compile: auto` compiles, and what it says."""

from __future__ import annotations

import pytest

from arriero.compiling import choose


def test_a_run_compiles_when_its_steps_pay_for_it_twice() -> None:
    """A tenth of 3 × 0.5 s is 0.15 s a step: 30 s of compiling are doubled after 400 steps."""
    assert not choose(forward_s=0.5, steps=399, device="cpu", zero_stage=1).compiled
    assert choose(forward_s=0.5, steps=401, device="cpu", zero_stage=1).compiled
    assert choose(forward_s=5.0, steps=41, device="cpu", zero_stage=2).compiled
    assert not choose(forward_s=0.001, steps=10_000, device="cpu", zero_stage=0).compiled


def test_the_reason_shows_the_sum() -> None:
    choice = choose(forward_s=0.1, steps=320, device="cpu", zero_stage=1)
    assert choice.reason == ("not compiled: 320 steps of about 0.3 s would gain about 10 s, compiling takes about 30 s")
    assert choose(forward_s=0.1, steps=320_000, device="cpu", zero_stage=1).reason.startswith(
        "decoder layers are compiled: 320,000 steps of about 0.3 s would gain about 9,600 s"
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_zero_3_is_never_compiled_by_itself(device: str) -> None:
    choice = choose(forward_s=100.0, steps=10**6, device=device, zero_stage=3)
    assert not choice.compiled
    assert "ZeRO-3" in choice.reason
