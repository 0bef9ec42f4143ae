"""Which parameters decay, and what an update is."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from arriero.config.schema import Model, ModelShape, Optim
from arriero.engine.optimizer import build_optimizer, parameter_roles
from arriero.model.build import PretrainModel, build_model, model_config


def model_t(**keys: Any) -> PretrainModel:
    """MODEL-T: 124,096 parameters, 320 of them in norms."""
    base = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2, "num_attention_heads": 4}
    recipe = Model(config=ModelShape.model_validate({**base, "num_key_value_heads": 2, **keys}), tokenizer="tok")
    config = model_config(recipe, None, vocab_size=259, seq_len=32, token_ids={})
    return build_model(recipe, config, seed=0, placement=nullcontext())


def groups(model: PretrainModel, optim: Optim) -> list[tuple[float, set[str]]]:
    names = {id(parameter): name for name, parameter in model.parameters_by_name()}
    built = build_optimizer(model.parameters_by_name(), parameter_roles(model.causal_lm), optim)
    return [(g["weight_decay"], {names[id(parameter)] for parameter in g["params"]}) for g in built.param_groups]


@pytest.mark.parametrize(("tied", "total"), [(False, 124_096), (True, 107_520)])
def test_b09_norms_and_biases_do_not_decay(tied: bool, total: int) -> None:
    model = model_t(tie_word_embeddings=tied)
    (decay, matrices), (none, vectors) = groups(model, Optim(weight_decay=0.1))
    assert (decay, none) == (0.1, 0.0)
    sizes = {name: parameter.numel() for name, parameter in model.parameters_by_name()}
    assert matrices | vectors == set(sizes)
    assert not matrices & vectors
    assert all("norm" in name for name in vectors)
    assert sum(sizes[name] for name in vectors) == 320
    assert sum(sizes.values()) == total
    assert "model.embed_tokens.weight" in matrices, "embeddings are matrices"
    assert ("lm_head.weight" in matrices) is not tied


def test_biases_are_vectors() -> None:
    (_, matrices), (_, vectors) = groups(model_t(attention_bias=True, mlp_bias=True), Optim())
    assert {name for name in matrices | vectors if name.endswith("bias")} <= vectors
    assert len([name for name in vectors if name.endswith("bias")]) == 14


def test_b09_norms_stay_1_where_nothing_but_decay_acts() -> None:
    """Ten updates without gradients at a rate of 1e-2: matrices shrink by (1 − 1e-3) each time, norms not at all."""
    model = model_t()
    before = {name: parameter.detach().clone() for name, parameter in model.parameters_by_name()}
    roles = parameter_roles(model.causal_lm)
    optimizer = build_optimizer(model.parameters_by_name(), roles, Optim(weight_decay=0.1))
    for group in optimizer.param_groups:
        group["lr"] = 1e-2
    for _ in range(10):
        for _, parameter in model.parameters_by_name():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    for name, parameter in model.parameters_by_name():
        if "norm" in name:
            assert (parameter == 1).all()
        else:
            torch.testing.assert_close(parameter.detach(), before[name] * (1 - 1e-3) ** 10)


def test_roles_follow_the_module_and_not_the_name() -> None:
    """Names are swapped and ranks mislead: a norm called weight_matrix, an embedding called norm, biases of experts."""

    class OwnNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight_matrix = nn.Parameter(torch.ones(4))

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.zeros(2, 4, 6))
            self.gate_up_proj_bias = nn.Parameter(torch.zeros(2, 6))

    model = nn.ModuleDict(
        {"norm": nn.Embedding(3, 4), "embed_tokens": OwnNorm(), "layernorm": nn.Linear(4, 2), "experts": Experts()}
    )
    assert parameter_roles(model) == {
        "norm.weight": "embedding",
        "embed_tokens.weight_matrix": "vector",
        "layernorm.weight": "matrix",
        "layernorm.bias": "bias",
        "experts.gate_up_proj": "matrix",
        "experts.gate_up_proj_bias": "bias",
    }


@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_has_one_role(tied: bool) -> None:
    model = model_t(tie_word_embeddings=tied)
    roles = parameter_roles(model.causal_lm)
    assert list(roles) == [name for name, _ in model.parameters_by_name()]
    assert roles["model.embed_tokens.weight"] == "embedding"
    assert roles.get("lm_head.weight") == (None if tied else "head")


def test_a_parameter_that_zero_3_has_put_away_is_known_by_its_full_shape() -> None:
    linear, norm = nn.Linear(3, 4, bias=False), nn.RMSNorm(4)
    for module, shape in ((linear, [4, 3]), (norm, [4])):
        module.weight.data = torch.zeros(0)
        module.weight.ds_shape = torch.Size(shape)
    model = nn.ModuleDict({"a": linear, "b": norm})
    assert parameter_roles(model) == {"a.weight": "matrix", "b.weight": "vector"}
    built = build_optimizer(model.named_parameters(), parameter_roles(model), Optim())
    assert [group["params"][0] is m.weight for group, m in zip(built.param_groups, (linear, norm), strict=True)]
    assert [group["weight_decay"] for group in built.param_groups] == [0.1, 0.0]


def test_it_is_torchs_fused_adamw_by_the_recipes_numbers() -> None:
    optim = Optim(adam_beta1=0.8, adam_beta2=0.99, adam_epsilon=1e-6, weight_decay=0.3, learning_rate=1.0)
    built = build_optimizer([("w", nn.Parameter(torch.zeros(2, 2)))], {"w": "matrix"}, optim)
    assert type(built) is torch.optim.AdamW
    assert len(built.param_groups) == 1, "an empty group is left out"
    (group,) = built.param_groups
    assert (group["betas"], group["eps"], group["weight_decay"], group["fused"]) == ((0.8, 0.99), 1e-6, 0.3, True)
    assert group["lr"] == 0.0, "the loop sets the rate before every update"


def test_muon_takes_the_layers_matrices_at_one_learning_rate() -> None:
    """A step of √max(1, rows/columns) on an orthogonal matrix, times the group's factor, has a root mean square of 0.2."""
    built: list[Any] = []
    model = model_t()
    names = {id(parameter): name for name, parameter in model.parameters_by_name()}
    optim = Optim(optimizer="muon", weight_decay=0.1, muon_momentum=0.9)
    build_optimizer(
        model.parameters_by_name(),
        parameter_roles(model.causal_lm),
        optim,
        muon=lambda groups, **_: built.extend(groups),
    )
    by_muon = {names[id(p)] for group in built if group["use_muon"] for p in group["params"]}
    assert by_muon == {name for name in names.values() if ".layers." in name and "norm" not in name}
    for group in built:
        assert all(parameter.use_muon is group["use_muon"] for parameter in group["params"])
        if not group["use_muon"]:
            assert "lr_factor" not in group
            continue
        assert group["momentum"] == 0.9
        assert group["weight_decay"] * group["lr_factor"] == pytest.approx(0.1)
        for parameter in group["params"]:
            rows, columns = parameter.shape
            orthogonal = torch.linalg.qr(torch.randn(max(rows, columns), min(rows, columns)))[0]
            step = orthogonal * max(1, rows / columns) ** 0.5 * group["lr_factor"]
            assert float(step.pow(2).mean().sqrt()) == pytest.approx(0.2, rel=1e-4)
