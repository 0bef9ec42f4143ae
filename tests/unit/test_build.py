"""Models that are built: their initial values, their sizes, their loss, and that documents don't see one another."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from arriero.config.schema import Model, ModelShape
from arriero.data.packing import build_row
from arriero.errors import UserError
from arriero.model.build import PretrainModel, build_model, initial_value, model_config, model_folder, parameter_total
from arriero.model.loss import LossHead
from arriero.planner.arithmetic import flops_per_token, parameter_count

SEQ_LEN = 32
IDS: dict[str, int | None] = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 2}


def shape(**keys: Any) -> ModelShape:
    """MODEL-T, with 259 tokens."""
    base = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2, "num_attention_heads": 4}
    return ModelShape.model_validate({**base, "num_key_value_heads": 2, **keys})


def build(
    of: ModelShape, *, seed: int = 0, vocab_size: int = 259, seq_len: int = SEQ_LEN, **model: Any
) -> PretrainModel:
    recipe = Model(config=of, tokenizer="tok", **model)
    config = model_config(recipe, None, vocab_size=vocab_size, seq_len=seq_len, token_ids=IDS)
    return build_model(recipe, config, seed=seed, placement=nullcontext())


def values(model: PretrainModel) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.parameters_by_name()}


# --------------------------------------------------------------------------------------------------------- initial values


def test_initial_values_depend_on_seed_and_name_alone() -> None:
    torch.manual_seed(1)
    first = values(build(shape()))
    torch.manual_seed(2)
    torch.rand(3)
    deeper = values(build(shape(num_hidden_layers=4), vocab_size=300))
    assert all(torch.equal(first[name], deeper[name]) for name in first if "embed" not in name and "head" not in name)
    other = values(build(shape(), seed=1))
    matrices = [name for name, value in first.items() if value.dim() == 2]
    assert not any(torch.equal(first[name], other[name]) for name in matrices)
    assert len({first[name].sum().item() for name in matrices}) == len(matrices), "no two matrices are alike"
    assert torch.equal(initial_value("x", (5, 7), 3, 0.02), initial_value("x", (5, 7), 3, 0.02))


def test_initial_values_are_those_of_the_config() -> None:
    model = values(build(shape(initializer_range=0.05, attention_bias=True, mlp_bias=True), vocab_size=2_000))
    for name, value in model.items():
        if name.endswith("bias"):
            assert (value == 0).all(), name
        elif "norm" in name:
            assert (value == 1).all(), name
        else:
            # 4,096 values and more: their deviation is known to 1/√(2·4096), 1.1 %
            assert float(value.std()) == pytest.approx(0.05, rel=0.06), name
            assert abs(float(value.mean())) < 0.05 * 5 / value.numel() ** 0.5, name
    assert {value.dtype for value in model.values()} == {torch.float32}


def test_tied_embeddings_are_one_parameter() -> None:
    tied = build(shape(tie_word_embeddings=True))
    assert tied.causal_lm.lm_head.weight is tied.causal_lm.model.embed_tokens.weight
    assert isinstance(tied.causal_lm.lm_head, LossHead)
    assert "lm_head.weight" not in values(tied)
    assert sum(value.numel() for value in values(tied).values()) == 107_520
    assert sum(value.numel() for value in values(build(shape())).values()) == 124_096


def test_the_first_loss_is_that_of_guessing() -> None:
    """ln 259 = 5.557 (B01)."""
    model = build(shape())
    ids, targets, positions = packed([SEQ_LEN])
    with torch.no_grad():
        loss, rows = model(ids, targets, positions)
    assert float(loss) / (SEQ_LEN - 1) == pytest.approx(np.log(259), abs=0.1)
    assert float(rows.sum()) == pytest.approx(float(loss), rel=1e-6)


# ------------------------------------------------------------------------------------------------------------------ sizes

SHAPES = {
    "grouped queries": shape(),
    "one head for each": shape(num_key_value_heads=None),
    "one key for all": shape(num_key_value_heads=1),
    "tied": shape(tie_word_embeddings=True),
    "biases": shape(attention_bias=True, mlp_bias=True),
    "wide heads": shape(head_dim=24),
    "narrow heads, tied, biases": shape(head_dim=8, tie_word_embeddings=True, attention_bias=True),
    "one layer": shape(num_hidden_layers=1, intermediate_size=64),
}


@pytest.mark.parametrize("name", SHAPES)
def test_parameter_count_is_what_the_model_has(name: str) -> None:
    model = build(SHAPES[name], vocab_size=301)
    assert parameter_count(SHAPES[name], 301) == sum(value.numel() for value in values(model).values())


@pytest.mark.parametrize("name", ["grouped queries", "one head for each", "wide heads", "tied"])
def test_flops_are_those_that_torch_counts(name: str) -> None:
    """torch counts the whole square of scores; we count causal attention's half of it. Else they agree exactly."""
    of = SHAPES[name]
    model = build(of, vocab_size=301, attn_implementation="eager")
    ids = torch.randint(301, (2, SEQ_LEN), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(SEQ_LEN).expand(2, -1)
    with FlopCounterMode(display=False) as counter:
        hidden = model.causal_lm.model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
        # Through logits: the loss head computes its gradients in the forward pass, once less than autograd would.
        (hidden @ model.causal_lm.lm_head.weight.T).sum().backward()
    counted = counter.get_total_flops() / ids.numel()
    heads, head = of.num_attention_heads, of.head_dim or of.hidden_size // of.num_attention_heads
    other_half = 6 * of.num_hidden_layers * SEQ_LEN * heads * head
    # Rotary tables are a product too: L · head / 2 a row, and nothing flows back into the first layer's tables.
    assert flops_per_token(of, 301, SEQ_LEN) + other_half == pytest.approx(counted, rel=2e-3)


# ------------------------------------------------------------------------------------------------------------------- loss


def packed(lengths: list[int], seed: int = 0, isolate: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """A row of documents of random tokens: input ids, targets, position ids, each ``[1, sum(lengths)]``."""
    total = sum(lengths)
    ids = np.random.default_rng(seed).integers(3, 259, total)
    starts = np.cumsum([0, *lengths[:-1]])
    row = build_row(ids, starts, np.arange(len(lengths)), seq_len=total, isolate=isolate, pad_id=2)
    first, second, third = (torch.from_numpy(part)[None] for part in (row.input_ids, row.targets, row.position_ids))
    return first, second, third


def test_a21_the_loss_is_the_shifted_cross_entropy() -> None:
    model = build(shape())
    ids, targets, positions = packed([SEQ_LEN])
    with torch.no_grad():
        loss, _ = model(ids, targets, positions)
        logits = model(ids, None, positions)
        plain = model.causal_lm(input_ids=ids, use_cache=False).logits
        theirs = model.causal_lm(input_ids=ids, labels=ids, use_cache=False).loss
    assert logits.shape == (1, SEQ_LEN, 259)
    torch.testing.assert_close(logits, plain)
    expected = functional.cross_entropy(plain[0, :-1], ids[0, 1:])
    assert float(loss) / (SEQ_LEN - 1) == pytest.approx(float(expected), abs=1e-6)
    assert float(loss) / (SEQ_LEN - 1) == pytest.approx(float(theirs), abs=1e-6)
    twice = functional.cross_entropy(plain[0, :-2], ids[0, 2:])
    assert abs(float(twice) - float(expected)) > 1e-3, "another shift would show"


def test_rows_have_their_own_losses() -> None:
    model = build(shape())
    ids, targets, positions = (torch.cat(parts) for parts in zip(packed([10, 22]), packed([32], 1), strict=True))
    with torch.no_grad():
        loss, rows = model(ids, targets, positions)
        alone = [model(ids[n : n + 1], targets[n : n + 1], positions[n : n + 1])[0] for n in range(2)]
    assert rows.shape == (2,)
    torch.testing.assert_close(rows, torch.stack(alone), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loss, rows.sum())


# -------------------------------------------------------------------------------------------------------------- isolation

DOCUMENTS = [9, 11, 12]


@contextmanager
def token_losses(model: PretrainModel) -> Iterator[list[Tensor]]:
    """Each forward's losses by token, ``[L]``, taken at the head."""
    found: list[Tensor] = []
    handle = model.causal_lm.lm_head.register_forward_hook(
        lambda module, args, result: found.append(result[1].detach())
    )
    try:
        yield found
    finally:
        handle.remove()


def leak(model: PretrainModel, *, restart: bool) -> tuple[float, float]:
    """How much the first document's own losses and those of the others move when the first is another text."""
    ids, targets, positions = packed(DOCUMENTS)
    if not restart:
        positions = torch.arange(sum(DOCUMENTS))[None]
    other = ids.clone()
    other[0, : DOCUMENTS[0]] = packed(DOCUMENTS, seed=9)[0][0, : DOCUMENTS[0]]
    with token_losses(model) as found:
        for text in (ids, other):
            loss, _ = model(text, targets, positions)
            if model.training:
                loss.backward()
    change = (found[0] - found[1]).abs()
    return float(change[: DOCUMENTS[0]].max()), float(change[DOCUMENTS[0] :].max())


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@pytest.mark.parametrize("kernel", ["auto", "sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["eval", "train", "train with activation checkpointing"])
def test_no_document_sees_another(kernel: str, dtype: torch.dtype, mode: str) -> None:
    """Exactly: not one bit of the later documents' losses depends on the first."""
    model = build(shape(initializer_range=0.2), attn_implementation=kernel).to(dtype)
    model.train(mode != "eval")
    if "checkpointing" in mode:
        model.causal_lm.gradient_checkpointing_enable({"use_reentrant": False})
    itself, others = leak(model, restart=True)
    assert itself > 0.1
    assert others == 0.0
    # With running positions the same measure finds a leak, so it can.
    assert leak(model, restart=False)[1] > 0.01


def test_gradients_do_not_leak_either() -> None:
    """With a loss on the last document alone, the others' embeddings get no gradient."""
    model = build(shape(initializer_range=0.2))
    ids = torch.arange(3, 3 + sum(DOCUMENTS))[None]
    _, targets, positions = packed(DOCUMENTS)
    targets[0, : sum(DOCUMENTS[:2])] = -100
    model(ids, targets, positions)[0].backward()
    gradient = model.causal_lm.model.embed_tokens.weight.grad.abs().sum(1)
    assert (gradient[3 : 3 + sum(DOCUMENTS[:2])] == 0).all()
    assert (gradient[3 + sum(DOCUMENTS[:2]) : 3 + sum(DOCUMENTS) - 1] > 0).all()


def test_a_document_in_a_row_is_the_document_alone() -> None:
    model = build(shape(initializer_range=0.2)).eval()
    ids, targets, positions = packed(DOCUMENTS)
    with torch.no_grad(), token_losses(model) as found:
        model(ids, targets, positions)
        start = 0
        for length in DOCUMENTS:
            part = slice(start, start + length)
            model(ids[:, part], targets[:, part], torch.arange(length)[None])
            torch.testing.assert_close(found[-1], found[0][part], rtol=1e-5, atol=1e-5)
            start += length


def test_rows_with_other_boundaries_do_not_meet() -> None:
    """Two rows in a batch whose documents begin at different places."""
    model = build(shape(initializer_range=0.2)).eval()
    ids, targets, positions = (torch.cat(parts) for parts in zip(packed([9, 23]), packed([20, 12], 1), strict=True))
    other = ids.clone()
    other[0, :9], other[1, :20] = 7, 8
    with torch.no_grad(), token_losses(model) as found:
        model(ids, targets, positions)
        model(other, targets, positions)
    change = (found[0] - found[1]).abs().view(2, 32)
    assert change[0, 9:].max() == change[1, 20:].max() == 0
    assert min(change[0, :8].max(), change[1, :19].max()) > 0.1


# ---------------------------------------------------------------------------------------------------------------- folders


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as Transformers saves it, of values that no seed would give."""
    folder = tmp_path_factory.mktemp("saved")
    model = build(shape())
    draw = torch.Generator().manual_seed(99)
    with torch.no_grad():
        for _, parameter in model.parameters_by_name():
            parameter.normal_(generator=draw)
    model.causal_lm.save_pretrained(folder)
    return folder


def load(folder: Path, *, vocab_size: int = 259, seq_len: int = SEQ_LEN) -> PretrainModel:
    recipe = Model(model_name_or_path=str(folder))
    config = model_config(recipe, folder, vocab_size=vocab_size, seq_len=seq_len, token_ids={})
    return build_model(recipe, config, seed=5, placement=nullcontext(), folder=folder)


def rewritten(saved: Path, folder: Path, change: Callable[[dict[str, Tensor]], object], **config: Any) -> Path:
    """A copy with other tensors and configuration."""
    tensors = load_file(saved / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((saved / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(text | config), encoding="utf-8")
    return folder


def test_a_folder_comes_back_bit_for_bit(saved: Path) -> None:
    stored, loaded = load_file(saved / "model.safetensors"), values(load(saved))
    assert stored.keys() == loaded.keys()
    assert all(torch.equal(stored[name], loaded[name]) for name in stored)


def test_bf16_weights_become_fp32_masters_without_loss(saved: Path, tmp_path: Path) -> None:
    def halve(tensors: dict[str, Tensor]) -> None:
        tensors.update({name: value.bfloat16() for name, value in tensors.items()})

    folder = rewritten(saved, tmp_path, halve, dtype="bfloat16")
    loaded, stored = values(load(folder)), load_file(folder / "model.safetensors")
    assert {value.dtype for value in loaded.values()} == {torch.float32}
    assert all(torch.equal(loaded[name], stored[name].float()) for name in stored)


def test_a_folder_in_several_files(saved: Path, tmp_path: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    names = sorted(tensors)
    index = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, tmp_path / file, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}), encoding="utf-8")
    (tmp_path / "config.json").write_bytes((saved / "config.json").read_bytes())
    loaded = values(load(tmp_path))
    assert all(torch.equal(tensors[name], loaded[name]) for name in tensors)


def test_tied_folders_load_with_and_without_their_head(tmp_path: Path) -> None:
    build(shape(tie_word_embeddings=True)).causal_lm.save_pretrained(tmp_path)
    plain = values(load(tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    again = load(tmp_path)
    assert again.causal_lm.lm_head.weight is again.causal_lm.model.embed_tokens.weight
    assert all(torch.equal(value, plain[name]) for name, value in values(again).items())


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), r"1 missing \['model.norm.weight'\], 0 unexpected"),
        (lambda tensors: tensors.pop("lm_head.weight"), r"1 missing \['lm_head.weight'\]"),
        (lambda tensors: tensors.update(extra=torch.zeros(1)), r"0 missing \[\], 1 unexpected \['extra'\]"),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.ones(63)}),
            r"model.norm.weight has the shape \(63,\), the model wants \(64,\)",
        ),
    ],
    ids=["a tensor missing", "the head missing", "a tensor too many", "another shape"],
)
def test_tensors_that_do_not_fit_are_refused(
    saved: Path, tmp_path: Path, change: Callable[[dict[str, Tensor]], object], problem: str
) -> None:
    with pytest.raises(UserError, match=problem):
        load(rewritten(saved, tmp_path, change))


def test_old_rotary_tables_in_a_folder_are_passed_over(saved: Path, tmp_path: Path) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)

    assert values(load(rewritten(saved, tmp_path, add))).keys() == values(load(saved)).keys()


def test_folders_without_weights_are_refused(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((saved / "config.json").read_bytes())
    with pytest.raises(UserError, match=r"holds no model.safetensors") as caught:
        load(tmp_path)
    assert "save_pretrained" in caught.value.remedy
    with pytest.raises(UserError, match=r"model.model_name_or_path: .*nowhere has no configuration"):
        load(tmp_path / "nowhere")


# ----------------------------------------------------------------------------------------------------------- configuration


def configure(of: ModelShape, **keys: Any) -> Any:
    recipe = Model(config=of, tokenizer="tok")
    return model_config(recipe, None, **{"vocab_size": 259, "seq_len": SEQ_LEN, "token_ids": IDS, **keys})


def test_a22_a_tokenizer_larger_than_the_embedding(saved: Path) -> None:
    with pytest.raises(UserError, match="the tokenizer has 262 tokens, the model only 259 embeddings") as caught:
        load(saved, vocab_size=262)
    assert "resize_token_embeddings" in caught.value.remedy
    with pytest.raises(UserError, match="the tokenizer has 259 tokens, the model only 256 embeddings"):
        configure(shape(vocab_size=256))
    assert configure(shape(vocab_size=384)).vocab_size == 384, "larger is fine, and not shrunk"
    assert load(saved, vocab_size=200).causal_lm.config.vocab_size == 259


def test_rows_longer_than_the_model_is_declared_for(saved: Path) -> None:
    with pytest.raises(UserError, match=r"data.seq_len 33 is beyond the model's max_position_embeddings 32"):
        load(saved, seq_len=33)
    assert configure(shape()).max_position_embeddings == SEQ_LEN
    assert configure(shape(max_position_embeddings=500)).max_position_embeddings == 500


def test_the_configuration_is_the_recipes() -> None:
    config = configure(shape(rms_norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 5e5}))
    assert (config.vocab_size, config.eos_token_id, config.pad_token_id, config.bos_token_id) == (259, 2, 2, None)
    assert (config.hidden_size, config.num_key_value_heads, config.rms_norm_eps) == (64, 2, 1e-6)
    assert config.rope_parameters["rope_theta"] == 5e5
    assert configure(shape(num_key_value_heads=None)).num_key_value_heads == 4
    with pytest.raises(UserError, match=r"model.config.model_type: Transformers has no 'lama'"):
        configure(shape(model_type="lama"))


def test_what_a_type_does_not_read_or_changes_is_refused() -> None:
    with pytest.raises(UserError, match=r"model.config: mistral models don't read mlp_bias"):
        configure(shape(model_type="mistral", mlp_bias=True))
    with pytest.raises(UserError, match=r"cohere models change their logits \(logit_scale is 0.0625\)"):
        configure(shape(model_type="cohere"))
    with pytest.raises(UserError, match="gpt2 models are built otherwise"):
        parameter_total(configure(ModelShape.model_construct(model_type="gpt2", n_embd=8)))


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "olmo2"])
def test_parameters_are_counted_as_they_are(model_type: str) -> None:
    config = configure(shape(model_type=model_type))
    built = build(shape(model_type=model_type))
    assert parameter_total(config) == sum(parameter.numel() for _, parameter in built.parameters_by_name())


def test_a_name_that_is_neither_folder_nor_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("no/such-model", "./nowhere/at/all"):
        with pytest.raises(UserError, match="there is no folder") as caught:
            model_folder(name)
        assert name in str(caught.value)


@pytest.mark.parametrize("model_type", ["mistral", "qwen2", "qwen3"])
def test_its_relatives_train_too(model_type: str) -> None:
    model = build(shape(model_type=model_type, initializer_range=0.2))
    assert leak(model.train(), restart=True)[1] == 0.0
    assert all(parameter.grad is not None for _, parameter in model.parameters_by_name())


# ----------------------------------------------------------------------------------------------------------------- rotary


@contextmanager
def everything_bf16() -> Iterator[None]:
    """As ZeRO-3's context: what torch's constructors make inside comes out in bf16, whatever was asked for."""
    plain = torch.arange

    def arange(*args: Any, **kwargs: Any) -> Tensor:
        made = plain(*args, **kwargs)
        return made.bfloat16() if made.is_floating_point() else made

    torch.arange = arange
    try:
        yield
    finally:
        torch.arange = plain


@pytest.mark.parametrize("scaling", [{"rope_type": "default"}, {"rope_type": "linear", "factor": 4.0}])
def test_rotary_tables_stay_fp32(scaling: dict[str, Any]) -> None:
    recipe = Model(config=shape(rope_parameters={"rope_theta": 10_000.0, **scaling}), tokenizer="tok")
    config = model_config(recipe, None, vocab_size=259, seq_len=SEQ_LEN, token_ids=IDS)
    plain = build_model(recipe, config, seed=0, placement=nullcontext())
    model = build_model(recipe, config, seed=0, placement=everything_bf16())
    expected = 10_000.0 ** -(torch.arange(0, 16, 2) / 16) / scaling.get("factor", 1)
    for built in (plain, model):
        tables = {name: buffer for name, buffer in built.named_buffers() if "inv_freq" in name}
        assert tables
        for table in tables.values():
            assert table.dtype == torch.float32
            torch.testing.assert_close(table, expected, rtol=1e-6, atol=0)
    assert "causal_lm.model.rotary_emb.inv_freq" not in model.state_dict()


def test_the_cache_is_off_whatever_a_caller_says() -> None:
    """With a cache, or an all-ones mask, Transformers builds a plain causal mask and documents leak."""
    assert build(shape()).causal_lm.config.use_cache is False
