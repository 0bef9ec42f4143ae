"""What a pipeline stage holds of a model: its own layers under their own names, and the same values."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from arriero.config.schema import Model
from arriero.engine.pipeline import keep_stage
from arriero.errors import UserError
from arriero.model.build import PretrainModel, build_model, model_config
from arriero.planner.layouts import Layout

IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}


def build(tied: bool, stage: int | None, folder: Path | None = None) -> PretrainModel:
    layout = Layout(2, pipeline=2)
    model = Model.model_validate({"config": SHAPE | {"tie_word_embeddings": tied}, "tokenizer": "t"})
    config = model_config(model, None, vocab_size=60, seq_len=16, token_ids=IDS)

    def keep(causal_lm: Any) -> None:
        keep_stage(causal_lm, layout, stage or 0)

    part = None if stage is None else keep
    return build_model(model, config, seed=3, placement=nullcontext(), folder=folder, keep_part=part)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("continued", [False, True])
def test_stages_hold_the_model_between_them(tmp_path: Path, tied: bool, continued: bool) -> None:
    whole = build(tied, None)
    if continued:
        with torch.no_grad():
            for parameter in whole.parameters():
                parameter.add_(torch.randn_like(parameter))
        whole.causal_lm.save_pretrained(tmp_path)
    truth = dict(whole.parameters_by_name())
    stages = [dict(build(tied, stage, tmp_path if continued else None).parameters_by_name()) for stage in range(2)]
    shared = set(stages[0]) & set(stages[1])
    assert shared == ({"model.embed_tokens.weight"} if tied else set())
    assert set(stages[0]) | set(stages[1]) == set(truth)
    # Two layers in the first stage, one in the second, under the numbers that they have in the whole model.
    assert {name.split(".")[2] for name in stages[0] if ".layers." in name} == {"0", "1"}
    assert {name.split(".")[2] for name in stages[1] if ".layers." in name} == {"2"}
    for stage in stages:
        for name, parameter in stage.items():
            assert torch.equal(parameter, truth[name]), name


def test_a_stage_needs_a_whole_folder(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    build(False, None).causal_lm.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    # The final norm is the last stage's; the first stage refuses the folder too, so that no rank waits for another.
    with pytest.raises(UserError, match=r"1 missing \['model.norm.weight'\]"):
        build(False, 0, tmp_path)
