"""The DeepSpeed dictionary: what is compiled, what a user's own JSON may add, and what it may not contradict."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from arriero.config.load import check_recipe, load_recipe
from arriero.config.schema import Recipe
from arriero.engine.ds_config import OURS, compile_ds_config, read_deepspeed_json, swap_folder, value_sources
from arriero.errors import UserError
from arriero.planner.arithmetic import accumulation_steps

ROOT = Path(__file__).parents[2] / "src/arriero/recipes"
SNAPSHOTS = Path(__file__).parent / "snapshots"
# Set by hand, then read the difference before committing it: UPDATE_SNAPSHOTS=1 pytest tests/unit/test_ds_config.py
UPDATE = "UPDATE_SNAPSHOTS" in os.environ


def recipe(stage: int = 1, precision: str = "bf16", **optim: Any) -> Recipe:
    shape = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2, "num_attention_heads": 4}
    return check_recipe(
        {
            "output_dir": "runs/x",
            "model": {"config": shape, "tokenizer": "tok"},
            "data": {"sources": [{"path": "data"}]},
            "train": {"max_steps": 10, "global_batch_size": 24, "precision": precision},
            "parallel": {"zero_stage": stage},
            "optim": {"learning_rate": 1e-5, **optim},
        },
        "test",
    )


def compiled(of: Recipe, raw: dict[str, Any] | None = None) -> tuple[dict[str, Any], list[str]]:
    """24 rows as 2 micro-batches of 4 rows on each of 3 ranks."""
    return compile_ds_config(of, raw or {}, "ds.json", micro_batch=4, accumulation=2, dp=3)


@pytest.mark.parametrize(
    ("stage", "parameters", "raw", "expected"),
    [
        (2, 1_000_000, None, 1_000_000),
        (3, 1_000_000, None, 1_000_000),
        (2, 500_000_000, None, None),
        (2, None, None, None),
        (2, 1_000_000, 7_000, 7_000),
        (2, 1_000_000, "auto", 64 * 64),
    ],
)
def test_the_bucket_is_no_larger_than_the_model(
    stage: int, parameters: int | None, raw: int | str | None, expected: int | None
) -> None:
    given = {} if raw is None else {"zero_optimization": {"reduce_bucket_size": raw}}
    found, notes = compile_ds_config(
        recipe(stage=stage),
        given,
        "ds.json",
        micro_batch=4,
        accumulation=2,
        dp=3,
        hidden_size=64,
        parameters=parameters,
    )
    assert found["zero_optimization"].get("reduce_bucket_size") == expected
    assert ("hidden_size 64" in " ".join(notes)) == (raw == "auto")


def refused(of: Recipe, raw: dict[str, Any]) -> list[str]:
    with pytest.raises(UserError) as caught:
        compiled(of, raw)
    first, *lines = caught.value.problem.split("\n")
    assert first == "the deepspeed section contradicts the recipe:"
    assert caught.value.exit_code == 2
    return [line.strip() for line in lines]


def leaves(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        if isinstance(inner, dict):
            yield from leaves(inner, f"{prefix}{key}.")
        else:
            yield prefix + key, inner


# -------------------------------------------------------------------------------------------------------------- snapshots

LAYOUTS = [(stage, precision) for stage in (1, 2, 3) for precision in ("bf16", "fp16", "fp32")] + [(0, "fp32")]


def compile_shipped(path: Path) -> dict[str, Any]:
    """As on two ranks."""
    shipped = load_recipe(path)
    micro_batch = shipped.train.per_device_train_batch_size
    assert micro_batch != "auto", "a shipped recipe says what was planned"
    accumulation = accumulation_steps(shipped.train, dp=2, micro_batch=micro_batch)
    raw, origin = read_deepspeed_json(shipped.deepspeed)
    return compile_ds_config(shipped, raw, origin, micro_batch=micro_batch, accumulation=accumulation, dp=2)[0]


SHIPPED = {"recipe-" + "-".join(path.relative_to(ROOT).with_suffix("").parts): path for path in ROOT.rglob("*.yaml")}


def compare(name: str, found: dict[str, Any]) -> None:
    assert not [path for path, value in leaves(found) if value == "auto"]
    file = SNAPSHOTS / f"{name}.json"
    if UPDATE:
        file.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    assert file.is_file(), f"no snapshot {file.name}: UPDATE_SNAPSHOTS=1 writes it, then look at it"
    assert found == json.loads(file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", SHIPPED)
def test_snapshot_of_a_shipped_recipe(name: str) -> None:
    compare(name, compile_shipped(SHIPPED[name]))


def test_snapshot_of_every_stage_and_precision() -> None:
    found = {f"stage {stage}, {precision}": compiled(recipe(stage, precision))[0] for stage, precision in LAYOUTS}
    compare("stages", found)


def test_no_snapshot_is_left_over() -> None:
    assert {file.stem for file in SNAPSHOTS.glob("*.json")} == {"stages", *SHIPPED}


def test_the_same_recipe_compiles_to_the_same_dictionary() -> None:
    raw = {"zero_optimization": {"overlap_comm": False}}
    first, second = (compiled(recipe(2), raw)[0] for _ in range(2))
    assert first == second
    assert raw == {"zero_optimization": {"overlap_comm": False}}, "the user's JSON is not written into"
    first["zero_optimization"]["stage"] = 9
    assert second["zero_optimization"]["stage"] == 2


# ------------------------------------------------------------------------------------------------------- the user's JSON

# The template that the Hugging Face documentation shows for ZeRO-3, without offload.
TEMPLATE: dict[str, Any] = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "total_num_steps": "auto",
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
        },
    },
    "zero_optimization": {
        "stage": "auto",
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}


@pytest.mark.parametrize("stage", [2, 3])
def test_b14_a_template_full_of_auto_resolves(stage: int) -> None:
    found, notes = compiled(recipe(stage), TEMPLATE)
    assert "auto" not in [value for _, value in leaves(found)]
    assert found["zero_optimization"] == {
        "stage": stage,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    assert (found["train_micro_batch_size_per_gpu"], found["gradient_accumulation_steps"]) == (4, 2)
    assert (found["bf16"]["enabled"], found["fp16"]["enabled"], found["fp16"]["hysteresis"]) == (True, False, 2)
    assert found["steps_per_print"] == 2000
    assert "optimizer" not in found
    assert "scheduler" not in found
    # Each "auto" is answered by name.
    asked = {path for path, value in leaves(TEMPLATE) if value == "auto"}
    assert asked <= {note.partition(":")[0] for note in notes}
    assert "train_batch_size: auto in ds.json, filled with 24 from train.global_batch_size" in notes
    assert (
        "optimizer.params.betas: auto in ds.json, filled with [0.9, 0.95] from optim.adam_beta1, optim.adam_beta2"
        in notes
    )
    assert "zero_optimization.reduce_bucket_size: auto in ds.json, left to DeepSpeed's default" in notes


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_what_deepspeed_itself_reads_is_right(precision: str) -> None:
    """Its own parser accepts what is compiled, the user's part included, and reads our numbers."""
    from deepspeed.runtime.precision_config import get_bfloat16_config, get_float16_config
    from deepspeed.runtime.zero.config import get_zero_config

    found, _ = compiled(recipe(3, precision), TEMPLATE)
    assert get_zero_config(found).stage == 3
    assert get_bfloat16_config(found).enabled == (precision == "bf16")
    assert get_float16_config(found).enabled == (precision == "fp16")


def test_values_that_repeat_the_recipe_are_fine() -> None:
    raw = {
        "train_batch_size": 24,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "none"}, "cpu_offload": False},
        "bfloat16": {"enabled": True, "bf16_master_weights_and_grads": False},
        "data_types": {"grad_accum_dtype": "fp32"},
        "optimizer": {
            "type": "adamw",
            "params": {"lr": 1e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "torch_adam": True},
        },
    }
    assert compiled(recipe(), raw) == compiled(recipe())


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        ({"train_batch_size": 32}, "train_batch_size is 32, but train.global_batch_size of the recipe makes it 24"),
        ({"gradient_clipping": 0}, "gradient_clipping is 0, but optim.max_grad_norm of the recipe makes it 1.0"),
        ({"gradient_clipping": True}, "gradient_clipping is True, but optim.max_grad_norm of the recipe makes it 1.0"),
        (
            {"optimizer": {"params": {"betas": [0.9, 0.999]}}},
            "optimizer.params.betas is [0.9, 0.999], but optim.adam_beta1, optim.adam_beta2 of the recipe makes it "
            "[0.9, 0.95]",
        ),
        (
            {"optimizer": {"type": "Lion"}},
            "optimizer.type is 'Lion', but optim.optimizer of the recipe makes it 'AdamW'",
        ),
        (
            {"optimizer": {"params": {"freeze_step": 400}}},
            "optimizer.params.freeze_step is 400, but the recipe's optim section builds the optimizer",
        ),
        (
            {"zero_optimization": {"stage": 3}},
            "zero_optimization.stage is 3, but parallel.zero_stage of the recipe makes it 1",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": True}}},
            "zero_optimization.offload_optimizer.device is 'cpu', but parallel.offload_optimizer of the recipe makes it "
            "'none'",
        ),
        (
            {"zero_optimization": {"cpu_offload": True}},
            "zero_optimization.cpu_offload is True, but parallel.offload_optimizer of the recipe makes it False",
        ),
        (
            {"bf16": {"bf16_master_weights_and_grads": True}},
            "bf16.bf16_master_weights_and_grads is True, but train.precision of the recipe makes it False",
        ),
        (
            {"data_types": {"grad_accum_dtype": "bf16"}},
            "data_types.grad_accum_dtype is 'bf16', but train.precision of the recipe makes it 'fp32'",
        ),
        ({"bf16": True}, "bf16 is True, expected an object"),
        ({"zero_optimization": 3}, "zero_optimization is 3, expected an object"),
        (
            {"zero_optimisation": {"stage": 1}},
            "zero_optimisation.stage: DeepSpeed has no such key, or training doesn't",
        ),
        ({"amp": {"enabled": True}}, "amp.enabled: NVIDIA Apex AMP integration has been removed"),
        (
            {"tensorboard": {"enabled": True}},
            "tensorboard.enabled: DeepSpeed has no such key, or training doesn't read",
        ),
    ],
)
def test_contradictions_name_both_sides(raw: dict[str, Any], problem: str) -> None:
    (line,) = refused(recipe(), raw)
    assert line.startswith(f"ds.json: {problem}")


@pytest.mark.parametrize("key", ["bf16", "bfloat16"])
def test_b14_bf16_there_and_fp32_here(key: str) -> None:
    (line,) = refused(recipe(1, "fp32"), {key: {"enabled": True}})
    assert line == "ds.json: bf16.enabled is True, but train.precision of the recipe makes it False"
    assert len(refused(recipe(1, "bf16"), {key: {"enabled": False}, "fp16": {"enabled": True}})) == 2


def test_b07_a_scheduler_block_is_refused_with_both_sides() -> None:
    raw = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}}
    (line,) = refused(recipe(), raw)
    assert line == (
        "ds.json: scheduler.params.warmup_num_steps is 10, but the schedule is the recipe's: optim.lr_scheduler_type "
        "cosine, optim.warmup_steps 0.02"
    )
    _, notes = compiled(recipe(), {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}}})
    assert len(notes) == 2
    assert all("the schedule is the recipe's cosine" in note for note in notes)


def test_all_contradictions_at_once() -> None:
    raw = {"train_batch_size": 1, "zero_optimization": {"stage": 0}, "nonsense": 1, "fp16": {"enabled": True}}
    assert [re.split(r"[ :]+", line)[1] for line in refused(recipe(), raw)] == [
        "train_batch_size",
        "zero_optimization.stage",
        "nonsense",
        "fp16.enabled",
    ]


def test_every_key_of_ours_has_its_key_in_the_recipe() -> None:
    from arriero.config.load import all_keys

    known = set(all_keys())
    assert all(key in known for keys in OURS.values() for key in keys.split(", "))
    for path, keys in OURS.items():
        raw: Any = "something else"
        for part in reversed(path.split(".")):
            raw = {part: raw}
        (line,) = refused(recipe(), raw)
        assert line.startswith(f"ds.json: {path} is 'something else', but {keys} of the recipe makes it ")


# ----------------------------------------------------------------------------------------- against DeepSpeed's own models


def offloading(optimizer: str, param: str, stage: int = 3, path: str | None = None) -> Recipe:
    value = recipe(stage).model_dump(mode="json")
    value["parallel"] |= {"offload_optimizer": optimizer, "offload_param": param, "nvme_path": path}
    return check_recipe(value, "test")


@pytest.mark.parametrize(
    ("zero", "problem"),
    [
        (
            {"overlap_com": True},
            "zero_optimization.overlap_com: zero_optimization has no key 'overlap_com' in DeepSpeed; is overlap_comm meant?",
        ),
        (
            {"offload_optimizer": {"pin_memry": True}},
            "zero_optimization.offload_optimizer.pin_memry: zero_optimization.offload_optimizer has no key 'pin_memry' in "
            "DeepSpeed; is pin_memory meant?",
        ),
        (
            {"leaf_module": {"klasses": ["x"]}},
            "zero_optimization.leaf_module.klasses: zero_optimization.leaf_module has no key 'klasses' in DeepSpeed; is "
            "classes meant?",
        ),
        ({"mics_shard_size": 2}, "zero_optimization.mics_shard_size: MiCS ZeRO-3 sharding has been removed"),
        ({"reduce_bucket_size": 0}, "zero_optimization.reduce_bucket_size: Input should be greater than 0, got 0"),
        ({"overlap_comm": "maybe"}, "zero_optimization.overlap_comm: Input should be a valid boolean"),
        ({"sub_group_size": -1}, "zero_optimization.sub_group_size: Input should be greater than or equal to 0"),
        (
            {"round_robin_gradients": True},
            "zero_optimization.round_robin_gradients is True, which training here doesn't do: a checkpoint's slices",
        ),
        (
            {"offload_optimizer": {"ratio": 0.5}},
            "zero_optimization.offload_optimizer.ratio is 0.5, which training here doesn't do",
        ),
    ],
)
def test_keys_and_values_that_deepspeed_refuses(zero: dict[str, Any], problem: str) -> None:
    (line,) = refused(recipe(3), {"zero_optimization": zero})
    assert line.startswith(f"ds.json: {problem}")


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (
            {"fp16": {"loss_scale_windows": 1}},
            "fp16.loss_scale_windows: fp16 has no key 'loss_scale_windows' in DeepSpeed",
        ),
        (
            {"aio": {"block_sizes": 1}},
            "aio.block_sizes: aio has no key 'block_sizes' in DeepSpeed; is block_size meant?",
        ),
        ({"timers": {"throughput": {"enable": 1}}}, "timers.throughput.enable: timers.throughput has no key 'enable'"),
        ({"communication_data_type": "fp8"}, "communication_data_type: Invalid communication_data_type"),
        ({"steps_per_print": "often"}, "steps_per_print: expected a number, got 'often'"),
        ({"prescale_gradients": "no"}, "prescale_gradients: expected true or false, got 'no'"),
        (
            {"sparse_gradients": True},
            "sparse_gradients: Sparse compression of dense torch.nn.Embedding gradients has been",
        ),
        ({"checkpoint": {"tag_validation": "Warn"}}, "checkpoint.tag_validation: checkpoints here are arriero's own"),
        ({"fp16": {"auto_cast": True}}, "fp16.auto_cast is True, which training here doesn't do"),
    ],
)
def test_other_sections_are_held_against_deepspeed_too(raw: dict[str, Any], problem: str) -> None:
    (line,) = refused(recipe(), raw)
    assert line.startswith(f"ds.json: {problem}")


def test_every_section_that_is_passed_on_is_known_to_deepspeed() -> None:
    """What the recipe's own dictionary holds, and each section's real keys, pass."""
    raw = {
        "activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": False},
        "aio": {"block_size": 262144, "queue_depth": 16, "single_submit": False},
        "comms_logger": {"enabled": False, "prof_all": True},
        "compile": {"deepcompile": False},
        "data_types": {"grad_accum_dtype": "fp32"},
        "flops_profiler": {"enabled": False, "profile_step": 5, "output_file": None},
        "timers": {"throughput": {"enabled": False}},
        "zero_optimization": {
            "stage3_max_live_parameters": 1e9,
            "offload_optimizer": {"device": "cpu", "pin_memory": True, "buffer_count": 4},
            "leaf_module": {"classes": []},
        },
        "zero_allow_untested_optimizer": True,
    }
    found, notes = compiled(offloading("cpu", "none"), raw)
    assert notes == []
    assert found["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": True, "buffer_count": 4}
    assert found["aio"] == raw["aio"]


def test_zero_plus_plus_is_passed_on_where_the_ranks_allow_it() -> None:
    raw = {"zero_optimization": {"zero_hpz_partition_size": 3, "zero_quantized_weights": True}}
    found, _ = compiled(recipe(3), raw)  # 3 ranks
    assert found["zero_optimization"] == {"stage": 3, **raw["zero_optimization"]}
    (line,) = refused(recipe(3), {"zero_optimization": {"zero_hpz_partition_size": 2}})
    assert line == (
        "ds.json: zero_optimization.zero_hpz_partition_size is 2, but 3 ranks don't divide into groups of 2; the nearest "
        "that fits is 1"
    )
    (line,) = refused(recipe(2), {"zero_optimization": {"zero_quantized_gradients": True}})
    assert line.startswith(
        "ds.json: zero_optimization.zero_quantized_gradients is True, which ZeRO++ has for stage 3 alone"
    )


def test_sizes_left_at_auto_are_filled_as_transformers_does() -> None:
    found, notes = compile_ds_config(
        recipe(3), TEMPLATE, "ds.json", micro_batch=4, accumulation=2, dp=3, hidden_size=64
    )
    zero = found["zero_optimization"]
    assert zero["reduce_bucket_size"] == 64 * 64
    assert zero["stage3_prefetch_bucket_size"] == int(0.9 * 64 * 64)
    assert zero["stage3_param_persistence_threshold"] == 640
    assert "zero_optimization.reduce_bucket_size: auto in ds.json, filled from the model's hidden_size 64" in notes


def test_offload_reaches_deepspeed_and_is_settled_with_the_file() -> None:
    of = offloading("nvme", "cpu", path="/disk")
    found, _ = compiled(of)
    folder = found["zero_optimization"]["offload_optimizer"]["nvme_path"]
    assert Path(folder).parent == Path("/disk"), "a folder of the run's own"
    assert folder != swap_folder(of.model_copy(update={"output_dir": "elsewhere/x"}))
    assert found["zero_optimization"] == {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": folder},
        "offload_param": {"device": "cpu"},
        "sub_group_size": 30_000_000,
    }
    raw = {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/other"}}}
    (line,) = refused(offloading("nvme", "none", path="/disk"), raw)
    assert line == (
        "ds.json: zero_optimization.offload_optimizer.nvme_path is '/other', but parallel.nvme_path of the recipe makes it "
        "'/disk'"
    )


@pytest.mark.parametrize(
    ("optimizer", "param", "stage", "path", "problem"),
    [
        ("cpu", "none", 0, None, "parallel.zero_stage"),  # bf16 at stage 0 is refused beside it
        ("nvme", "none", 2, "/disk", "nvme needs zero_stage 3, got 2; use zero_stage 3, or offload to cpu"),
        ("none", "cpu", 2, None, "parallel.offload_param: cpu needs zero_stage 3, got 2"),
        ("nvme", "none", 3, None, "parallel.nvme_path: nvme offload needs a folder"),
        ("cpu", "none", 3, "/disk", "parallel.nvme_path: nothing is offloaded to nvme"),
    ],
)
def test_offload_that_can_not_be(optimizer: str, param: str, stage: int, path: str | None, problem: str) -> None:
    with pytest.raises(UserError) as caught:
        offloading(optimizer, param, stage, path)
    assert problem in str(caught.value)


def muon(stage: int = 3, **keys: Any) -> Recipe:
    value = recipe(stage).model_dump(mode="json")
    value["optim"] |= {"optimizer": "muon", "max_grad_norm": 0, **keys}
    return check_recipe(value, "test")


def test_muon_decides_two_more_values() -> None:
    found, _ = compiled(muon())
    assert found["zero_optimization"] == {"stage": 3, "reduce_scatter": False}
    assert found["communication_data_type"] == "fp32"
    assert value_sources(muon(), {}, "ds.json", found)["communication_data_type"] == "optim.optimizer"
    (line,) = refused(muon(), {"communication_data_type": "bf16"})
    assert line == "ds.json: communication_data_type is 'bf16', but optim.optimizer of the recipe makes it 'fp32'"


@pytest.mark.parametrize(
    ("stage", "keys", "problem"),
    [
        (1, {}, "the nearest is zero_stage 3"),
        (2, {}, "the nearest is zero_stage 3"),
        (3, {"max_grad_norm": 1.0}, "clipping at 1 would shrink the steps themselves; set it to 0"),
    ],
)
def test_muon_where_it_can_not_be(stage: int, keys: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError) as caught:
        muon(stage, **keys)
    assert problem in str(caught.value)


def test_where_each_value_came_from() -> None:
    of = recipe(3)
    raw = {**TEMPLATE, "aio": {"queue_depth": 16}}
    found, _ = compile_ds_config(of, raw, "ds.json", micro_batch=4, accumulation=2, dp=3, hidden_size=64)
    sources = value_sources(of, raw, "ds.json", found)
    assert set(sources) == {path for path, _ in leaves(found)}
    assert sources["zero_optimization.stage"] == "parallel.zero_stage, auto in ds.json"
    assert (
        sources["train_micro_batch_size_per_gpu"] == "train.per_device_train_batch_size (its default), auto in ds.json"
    )
    assert sources["gradient_clipping"] == "optim.max_grad_norm (its default), auto in ds.json"
    assert sources["bf16.enabled"] == "train.precision, auto in ds.json"
    assert sources["zero_optimization.reduce_bucket_size"] == "ds.json, from hidden_size"
    assert sources["aio.queue_depth"] == "ds.json"
    assert sources["prescale_gradients"] == "arriero"


# ------------------------------------------------------------------------------------------------------------- read as JSON


def test_read_deepspeed_json(tmp_path: Path) -> None:
    assert read_deepspeed_json({"a": 1}) == ({"a": 1}, "deepspeed")
    path = tmp_path / "ds.json"
    path.write_text('{"bf16": {"enabled": true}}', encoding="utf-8")
    assert read_deepspeed_json(str(path)) == ({"bf16": {"enabled": True}}, str(path))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "can't read .*ds.json: No such file"),
        ("{", "is not valid JSON: .*line 1"),
        ("[1]", "holds list, expected"),
        ('{"bf16": {"enabled": true, "enabled": false}}', "the key 'enabled' stands there twice"),
    ],
)
def test_files_that_are_no_deepspeed_json(tmp_path: Path, text: str | None, problem: str) -> None:
    path = tmp_path / "ds.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=problem):
        read_deepspeed_json(str(path))


# ------------------------------------------------------------------------------------------------- ranks that share a model


def shared(stage: int = 1, **axes: int) -> Recipe:
    value = recipe(stage).model_dump()
    value["parallel"] |= axes
    return Recipe.model_validate(value)


def test_tensor_parallelism_is_deepspeeds_autotp() -> None:
    of = shared(tensor_parallel_size=2)
    assert compiled(of)[0]["tensor_parallel"] == {"autotp_size": 2, "vocab_parallel_lm_head": False}
    assert "tensor_parallel" not in compiled(shared(sequence_parallel_size=2))[0]
    same, _ = compiled(of, {"tensor_parallel": {"autotp_size": 2}})
    assert same["tensor_parallel"]["autotp_size"] == 2
    (line,) = refused(of, {"tensor_parallel": {"autotp_size": 4}})
    assert "parallel.tensor_parallel_size of the recipe makes it 2" in line


def test_with_shared_rows_zero_3_must_reduce_by_scattering() -> None:
    raw = {"zero_optimization": {"reduce_scatter": False}}
    (line,) = refused(shared(3, sequence_parallel_size=2), raw)
    assert "reduce_scatter is False" in line
    assert compiled(shared(2, sequence_parallel_size=2), raw)[0]["zero_optimization"]["reduce_scatter"] is False
    assert compiled(shared(3), raw)[0]["zero_optimization"]["reduce_scatter"] is False
