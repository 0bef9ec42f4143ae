"""Other systems' settings into recipes, with inputs as those systems' users have them; contradictions are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from arriero.cli.main import app
from arriero.config.load import check_recipe, parse_yaml
from arriero.config.schema import Recipe
from arriero.convert.convert import Converted, convert
from arriero.errors import UserError

# As DeepSpeed-Chat's own training scripts are written: defaults by position, continued lines, output redirected.
SCRIPT = """#!/bin/bash
OUTPUT=$1
ZERO_STAGE=$2
if [ "$OUTPUT" == "" ]; then
    OUTPUT=./output_step1_llama2_7b
fi
if [ "$ZERO_STAGE" == "" ]; then
    ZERO_STAGE=3
fi
mkdir -p $OUTPUT

deepspeed --num_nodes 2 --num_gpus 8 main.py \\
   --data_path Dahoas/rm-static ./mules \\
   --data_split 2,4,4 \\
   --model_name_or_path meta-llama/Llama-2-7b-hf \\
   --per_device_train_batch_size 4 \\
   --per_device_eval_batch_size 4 \\
   --max_seq_len 2048 \\
   --learning_rate 9.65e-6 \\
   --weight_decay 0. \\
   --num_train_epochs 4  \\
   --gradient_accumulation_steps 2 \\
   --lr_scheduler_type cosine \\
   --num_warmup_steps 10 \\
   --seed 1234 \\
   --gradient_checkpointing \\
   --dtype bf16 \\
   --zero_stage $ZERO_STAGE \\
   --offload \\
   --lora_dim 128 \\
   --lora_module_name "layers." \\
   --deepspeed \\
   --output_dir ${OUTPUT} \\
   &> $OUTPUT/training.log
"""
# As DeepSpeed's documentation and LLaMA-Factory's examples have it, full of "auto".
ZERO3 = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    },
}
LLAMA_FACTORY: dict[str, Any] = {
    "model_name_or_path": "meta-llama/Meta-Llama-3-8B",
    "stage": "pt",
    "do_train": True,
    "finetuning_type": "full",
    "deepspeed": "ds_z3_config.json",
    "dataset": "c4_demo,wiki_demo",
    "mix_strategy": "interleave_under",
    "interleave_probs": "0.7,0.3",
    "cutoff_len": 4096,
    "max_samples": 1000,
    "preprocessing_num_workers": 16,
    "output_dir": "saves/llama3-8b/full/pretrain",
    "logging_steps": 10,
    "save_steps": 500,
    "plot_loss": True,
    "report_to": "none",
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 8,
    "learning_rate": 1e-4,
    "num_train_epochs": 3.0,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.1,
    "bf16": True,
    "ddp_timeout": 180000000,
    "val_size": 0.1,
    "eval_strategy": "steps",
    "eval_steps": 500,
}


def recipe_of(made: Converted) -> Recipe:
    return check_recipe(parse_yaml(made.text), "converted")


def written(folder: Path, name: str, value: Any) -> Path:
    path = folder / name
    text = value if isinstance(value, str) else json.dumps(value) if name.endswith("json") else yaml.safe_dump(value)
    path.write_text(text, encoding="utf-8")
    return path


def trainer_json(folder: Path, **more: Any) -> Path:
    """What ``TrainingArguments.to_json_string`` itself writes: every argument, most of them defaults."""
    from transformers import TrainingArguments

    own = {"model_name_or_path", "dataset_name", "dataset_config_name", "train_file", "block_size", "deepspeed", "fp16"}
    given = {
        "output_dir": "out/gpt",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "learning_rate": 2e-4,
        "max_steps": 5000,
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr": 2e-5},
        "warmup_steps": 0.03,
        "bf16": True,
        "use_cpu": True,
        **{key: value for key, value in more.items() if key not in own},
    }
    value = json.loads(TrainingArguments(**given).to_json_string())
    base = {"model_name_or_path": "HuggingFaceTB/SmolLM2-135M", "train_file": "corpus.jsonl", "block_size": 2048}
    return written(folder, "args.json", value | base | {key: more[key] for key in own & more.keys()})


# ------------------------------------------------------------------------------------------------------ DeepSpeed-Chat


def test_a_script_of_deepspeed_chat(tmp_path: Path) -> None:
    made = convert(str(written(tmp_path, "run_llama2_7b.sh", SCRIPT)))
    recipe = recipe_of(made)
    assert made.system == "DeepSpeed-Chat"
    assert recipe.output_dir == "./output_step1_llama2_7b"
    assert recipe.model.model_name_or_path == "meta-llama/Llama-2-7b-hf"
    assert [source.path for source in recipe.data.sources] == ["work/rm-static", "work/mules"]
    assert (recipe.data.seq_len, recipe.train.seed, recipe.train.num_train_epochs) == (2048, 1234, 4)
    assert (recipe.train.per_device_train_batch_size, recipe.train.global_batch_size) == (4, 4 * 2 * 16)
    assert (recipe.train.precision, recipe.train.activation_checkpointing) == ("bf16", True)
    assert (recipe.optim.learning_rate, recipe.optim.weight_decay, recipe.optim.warmup_steps) == (9.65e-6, 0, 10)
    assert recipe.optim.min_lr_ratio == 0, "its cosine ends at 0, ours by default at a tenth"
    assert (recipe.parallel.zero_stage, recipe.parallel.offload_optimizer, recipe.parallel.offload_param) == (
        3,
        "cpu",
        "cpu",
    )
    assert (recipe.eval.per_device_eval_batch_size, recipe.eval.eval_steps) == (4, None)
    assert list(made.dropped) == ["--lora_dim: lora_dim 128 lora_module_name layers.", "--data_split: 2,4,4"]
    assert made.commands[0] == (
        "arriero prepare hf://Dahoas/rm-static --tokenizer meta-llama/Llama-2-7b-hf --out work/rm-static"
    )
    assert made.text.count("# Not carried over: ") == 2


def test_a_command_with_the_script_s_own_defaults() -> None:
    """What it leaves out has DeepSpeed-Chat's value, where ours is another."""
    recipe = recipe_of(
        convert("deepspeed --include localhost:0,1,3 main.py --model_name_or_path opt --data_path a b", gpus=3)
    )
    assert (recipe.train.global_batch_size, recipe.train.precision, recipe.data.seq_len) == (48, "fp16", 512)
    assert (recipe.optim.learning_rate, recipe.train.seed) == (1e-3, 1234)
    assert recipe.parallel.zero_stage == 1


@pytest.mark.parametrize(
    ("command", "gpus", "problem"),
    [
        ("deepspeed main.py --model_name_or_path m --data_path d", None, "on how many GPUs did it run"),
        ("deepspeed --num_gpus 4 main.py --model_name_or_path m", 8, "the command says 4, --gpus says 8"),
        ("deepspeed main.py --data_path d", 1, "no --model_name_or_path"),
        ("deepspeed main.py --model_name_or_path m --seed 1 --seed 2", 1, "--seed stands there twice"),
        ("deepspeed main.py --model_name_or_path $MODEL", 1, r"says what \$MODEL is"),
        ("deepspeed main.py --model_name_or_path m --actor_model_name_or_path n", 1, "RLHF step"),
        ("deepspeed main.py --model_name_or_path 'm", 1, "can't be read"),
        ("deepspeed main.py --model_name_or_path m --learning_rate fast", 1, "optim.learning_rate: expected a number"),
        ("python --help", None, "no DeepSpeed-Chat command"),
        ("nowhere.sh", None, "there is no file nowhere.sh"),
    ],
)
def test_commands_that_can_t_be_meant(command: str, gpus: int | None, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        convert(command, gpus=gpus)


# --------------------------------------------------------------------------------------------------------- Hugging Face


def test_training_arguments_as_they_are_saved(tmp_path: Path) -> None:
    made = convert(
        str(trainer_json(tmp_path, hub_token="hf_SECRET", label_smoothing_factor=0.1, dataloader_num_workers=4)), gpus=4
    )
    recipe = recipe_of(made)
    assert (recipe.train.max_steps, recipe.train.num_train_epochs) == (5000, None)
    assert (recipe.train.per_device_train_batch_size, recipe.train.global_batch_size) == (2, 2 * 4 * 4)
    assert (recipe.optim.lr_scheduler_type, recipe.optim.min_lr_ratio) == ("cosine_with_min_lr", pytest.approx(0.1))
    assert (recipe.optim.warmup_steps, recipe.optim.adam_beta2, recipe.optim.weight_decay) == (0.03, 0.999, 0.0)
    assert (recipe.data.seq_len, recipe.data.isolate_documents) == (2048, False)
    assert (recipe.checkpoint.save_steps, recipe.checkpoint.save_total_limit) == (500, None)
    # Of over a hundred arguments only what was set and has no place is named, and no secret.
    assert {name.partition(":")[0] for name in made.dropped} == {"label_smoothing_factor", "dataloader_num_workers"}
    assert "hf_SECRET" not in made.text
    assert made.commands == ("arriero prepare corpus.jsonl --tokenizer HuggingFaceTB/SmolLM2-135M --out work/corpus",)


def test_older_names_and_a_deepspeed_file_full_of_auto(tmp_path: Path) -> None:
    zero = {**ZERO3, "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.98]}}, "nonsense": 3}
    written(tmp_path, "ds.json", zero)
    value = {
        "model_name_or_path": "m",
        "train_file": "a.txt",
        "deepspeed": "ds.json",
        "evaluation_strategy": "epoch",
        "warmup_ratio": 0.1,
        "warmup_steps": 100,
        "gradient_checkpointing": True,
        "fp16": True,
        "save_strategy": "epoch",
        "report_to": ["tensorboard", "clearml"],
        "group_by_length": True,
        "data_seed": 7,
        "optim": "adamw_bnb_8bit",
        "half_life": 2,
    }
    made = convert(str(written(tmp_path, "args.json", value)), gpus=2)
    recipe = recipe_of(made)
    assert (recipe.parallel.zero_stage, recipe.parallel.offload_optimizer) == (3, "cpu")
    assert (recipe.train.precision, recipe.train.num_train_epochs, recipe.train.global_batch_size) == ("fp16", 3, 16)
    assert (recipe.optim.warmup_steps, recipe.optim.adam_beta2, recipe.optim.learning_rate) == (100, 0.98, 5e-5)
    assert recipe.eval.eval_steps is None
    assert isinstance(recipe.deepspeed, dict)
    assert recipe.deepspeed["zero_optimization"]["overlap_comm"] is True
    assert recipe.deepspeed["zero_optimization"]["offload_optimizer"] == {"pin_memory": True}
    assert "auto" not in json.dumps(recipe.deepspeed)
    assert {name.partition(":")[0] for name in made.dropped} == {
        *("warmup_ratio", "save_strategy", "report_to", "group_by_length", "data_seed", "optim", "half_life"),
        *("nonsense", "zero_allow_untested_optimizer", "fp16.initial_scale_power"),
    }


def test_fsdp_becomes_a_stage(tmp_path: Path) -> None:
    value = {"model_name_or_path": "m", "train_file": "a.txt", "bf16": True, "fsdp": "full_shard auto_wrap offload"}
    recipe = recipe_of(convert(str(written(tmp_path, "args.json", value)), gpus=1))
    assert (recipe.parallel.zero_stage, recipe.parallel.offload_optimizer) == (3, "cpu")


def test_a_contradiction_is_refused_with_both_sides(tmp_path: Path) -> None:
    base = {"model_name_or_path": "m", "train_file": "a.txt", "bf16": True}
    for more, problem in (
        ({"fp16": True}, "train.precision: bf16 says bf16, fp16 says fp16"),
        ({"dataset_name": "o/d"}, "dataset_name says o/d, train_file says a.txt"),
        ({"deepspeed": {"gradient_accumulation_steps": 2}, "gradient_accumulation_steps": 4}, "says 4, the DeepSpeed JSON 2"),
        ({"deepspeed": {"train_batch_size": 7}}, "the DeepSpeed JSON's train_batch_size says 7"),
        ({"deepspeed": {"fp16": {"enabled": True}}}, "fp16.enabled says fp16, bf16 says bf16"),
        ({"deepspeed": {"optimizer": {"params": {"lr": 1e-3}}}, "learning_rate": 1e-4}, "params.lr says 0.001, learning_rate says 0.0001"),
    ):  # fmt: skip
        with pytest.raises(UserError, match="contradict") as caught:
            convert(str(written(tmp_path, "args.json", base | more)), gpus=1)
        assert problem in str(caught.value)


def test_the_number_of_gpus_is_asked_for_or_follows(tmp_path: Path) -> None:
    base = {"model_name_or_path": "m", "train_file": "a.txt", "bf16": True}
    with pytest.raises(UserError, match="on how many GPUs"):
        convert(str(written(tmp_path, "args.json", base)))
    zero = {"deepspeed": {"train_batch_size": 64, "gradient_accumulation_steps": 2}}
    recipe = recipe_of(convert(str(written(tmp_path, "args.json", base | zero))))
    assert recipe.train.global_batch_size == 64


# -------------------------------------------------------------------------------------------------------- LLaMA-Factory


def test_a_pre_training_file_of_llama_factory(tmp_path: Path) -> None:
    written(tmp_path, "ds_z3_config.json", ZERO3)
    (tmp_path / "data").mkdir()
    info = {
        "c4_demo": {"file_name": "c4_demo.jsonl", "columns": {"prompt": "text"}},
        "wiki_demo": {"hf_hub_url": "someone/wikipedia-cn", "columns": {"prompt": "completion"}},
    }
    written(tmp_path / "data", "dataset_info.json", info)
    made = convert(str(written(tmp_path, "pretrain.yaml", LLAMA_FACTORY)), gpus=8)
    recipe = recipe_of(made)
    assert [(source.path, source.weight) for source in recipe.data.sources] == [
        ("work/c4_demo", 0.7),
        ("work/wikipedia-cn", 0.3),
    ]
    assert made.commands[1].endswith("--out work/wikipedia-cn --text-field completion")
    assert (recipe.data.seq_len, recipe.data.isolate_documents, recipe.data.validation_split) == (4096, False, 0.1)
    assert (recipe.train.global_batch_size, recipe.train.num_train_epochs, recipe.train.precision) == (64, 3, "bf16")
    assert (recipe.optim.warmup_steps, recipe.optim.min_lr_ratio) == (0.1, 0)
    assert (recipe.parallel.zero_stage, recipe.parallel.offload_optimizer) == (3, "cpu")
    assert recipe.log.report_to == ()
    assert {name.partition(":")[0] for name in made.dropped} == {
        *("max_samples", "plot_loss", "preprocessing_num_workers", "ddp_timeout"),
        *("zero_allow_untested_optimizer", "fp16.initial_scale_power"),
    }


def test_what_llama_factory_contradicts_or_does_otherwise(tmp_path: Path) -> None:
    def of(**changes: Any) -> Converted:
        value = {key: one for key, one in (LLAMA_FACTORY | {"deepspeed": None} | changes).items() if one is not None}
        return convert(str(written(tmp_path, "pt.yaml", value)), gpus=1)

    with pytest.raises(UserError, match="stage: sft isn't pre-training"):
        of(stage="sft")
    with pytest.raises(UserError, match="2 datasets, but 3 interleave_probs"):
        of(interleave_probs="0.5,0.3,0.2")
    with pytest.raises(UserError, match="mix_strategy says concat"):
        of(mix_strategy=None)
    with pytest.raises(UserError, match="packing says false, neat_packing says true"):
        of(packing=False, neat_packing=True)
    lora = of(finetuning_type="lora", lora_rank=8, lora_target="all", packing=False, val_size=100)
    assert [name for name in lora.dropped if name.startswith(("finetuning", "val_size"))] == [
        "finetuning_type: lora lora_rank 8 lora_target all",
        "val_size: 100",
    ]
    assert recipe_of(lora).data.packing == "best_fit"
    assert recipe_of(of(neat_packing=True)).data.isolate_documents is True


# ----------------------------------------------------------------------------------------------------------- as a command


def test_the_command_writes_a_recipe_and_names_the_rest(tmp_path: Path) -> None:
    script, out = written(tmp_path, "run.sh", SCRIPT), tmp_path / "my.yaml"
    runner = CliRunner()
    done = runner.invoke(app, ["recipes", "convert", str(script), "--out", str(out)], catch_exceptions=False)
    assert done.exit_code == 0
    assert f"arriero train {out} --dry-run" in done.stdout
    assert [line.split()[3] for line in done.stderr.splitlines()] == ["--lora_dim:", "--data_split:"]
    printed = runner.invoke(app, ["recipes", "convert", str(script)], catch_exceptions=False).stdout
    assert printed == out.read_text(encoding="utf-8")
    with pytest.raises(UserError, match="exists already"):
        runner.invoke(app, ["recipes", "convert", str(script), "--out", str(out)], catch_exceptions=False)
    axolotl = written(tmp_path, "axolotl.yaml", {"base_model": "m", "sequence_len": 2048})
    with pytest.raises(UserError, match="looks like Axolotl's") as caught:
        runner.invoke(app, ["recipes", "convert", str(axolotl)], catch_exceptions=False)
    assert "`arriero keys axolotl`" in caught.value.remedy
    own = written(tmp_path, "ds.json", ZERO3)
    with pytest.raises(UserError, match="DeepSpeed's own configuration"):
        runner.invoke(app, ["recipes", "convert", str(own)], catch_exceptions=False)
