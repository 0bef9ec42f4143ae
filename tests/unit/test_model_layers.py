"""Layers whose activations are recomputed: the same numbers, less kept, and of which layers."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from arriero.config.schema import Model, ModelShape
from arriero.model.build import PretrainModel, build_model, model_config
from arriero.model.layers import _Recomputed, plain_gate, plain_norm, replace_operations, use_liger

ROWS, SEQ_LEN, LAYERS = 2, 24, 5


def build(dropout: float = 0.0) -> PretrainModel:
    shape = ModelShape(
        hidden_size=32,
        intermediate_size=88,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        attention_dropout=dropout,
    )
    recipe = Model(config=shape, tokenizer="unused")
    ids = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 1}
    config = model_config(recipe, None, vocab_size=64, seq_len=SEQ_LEN, token_ids=ids)
    return build_model(recipe, config, seed=3, placement=nullcontext()).to(torch.bfloat16).train()


def one_pass(model: PretrainModel) -> tuple[list[Tensor], int]:
    """The loss and every gradient, and how many elements are kept for the backward pass."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(64, (ROWS, SEQ_LEN + 1), generator=draw)
    positions = torch.cat([torch.arange(10), torch.arange(SEQ_LEN - 10)]).repeat(ROWS, 1)
    kept = 0

    def keep(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.numel()
        return tensor

    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss, _ = model(ids[:, :-1], ids[:, 1:], positions)
    loss.backward()
    gradients = [parameter.grad for _, parameter in model.parameters_by_name()]
    return [loss.detach(), *gradients], kept


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_recomputing_changes_no_bit_and_keeps_less(dropout: float) -> None:
    """Dropout draws the same numbers again the second time."""
    whole, everything = one_pass(build(dropout))
    before = everything
    for every in (3, 2, 1):
        model = build(dropout)
        model.recompute_layers(every)
        values, kept = one_pass(model)
        assert all(torch.equal(a, b) for a, b in zip(values, whole, strict=True))
        assert kept < before
        before = kept


@pytest.mark.parametrize(("every", "recomputed"), [(1, [0, 1, 2, 3, 4]), (2, [0, 2, 4]), (3, [0, 3]), (9, [0])])
def test_every_nth_layer(every: int, recomputed: list[int]) -> None:
    model = build()
    model.recompute_layers(every)
    layers = model.causal_lm.model.layers
    assert [n for n, layer in enumerate(layers) if isinstance(layer.forward, _Recomputed)] == recomputed


def test_evaluation_recomputes_nothing() -> None:
    model = build().eval()
    calls = 0
    layer = model.causal_lm.model.layers[0]
    plain = layer.forward

    def counted(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        return plain(*args, **kwargs)

    layer.forward = counted
    model.recompute_layers(1)
    ids = torch.zeros(1, SEQ_LEN, dtype=torch.int64)
    model(ids, ids, torch.arange(SEQ_LEN)[None])[0].backward()
    assert calls == 1
    model.train()(ids, ids, torch.arange(SEQ_LEN)[None])[0].backward()
    assert calls == 3, "once forward, once in the backward pass"


def test_replaced_operations_compute_the_same_and_no_class_is_changed() -> None:
    """The way Liger's kernels are put in, with the plain twins that they are compared with on a GPU."""
    whole, _ = one_pass(build())
    model = build()
    calls = {"norm": 0, "gate": 0}

    def norm(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        calls["norm"] += 1
        return plain_norm(hidden, weight, epsilon)

    def gate(one: Tensor, other: Tensor) -> Tensor:
        calls["gate"] += 1
        return plain_gate(one, other)

    assert replace_operations(model.causal_lm, norm, gate) == 3 * LAYERS + 1
    values, _ = one_pass(model)
    assert calls == {"norm": 2 * LAYERS + 1, "gate": LAYERS}
    assert all(torch.equal(a, b) for a, b in zip(values, whole, strict=True))
    one_pass(build())
    assert calls == {"norm": 2 * LAYERS + 1, "gate": LAYERS}, "another model is as it was"


def test_without_liger_it_says_so() -> None:
    try:
        import liger_kernel.ops  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError):
            use_liger(build().causal_lm)
    else:
        pytest.skip("liger-kernel is installed")
