"""From YAML and overrides to a recipe: what is read, what is refused, and with which words."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from arriero.config import schema
from arriero.config.load import all_keys, check_recipe, differing_keys, load_recipe, parse_yaml, recipe_yaml
from arriero.errors import UserError

RECIPES = sorted((Path(__file__).parents[2] / "src/arriero/recipes").rglob("*.yaml"))

SMALL = """\
output_dir: runs/x
model:
  tokenizer: tok
  config: {hidden_size: 64, intermediate_size: 172, num_hidden_layers: 2, num_attention_heads: 4}
data:
  sources: [{path: data/a, weight: 0.7}, {path: data/b, weight: 0.3}]
train: {max_steps: 10}
"""


def write(folder: Path, text: str = SMALL) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def small(**sections: Any) -> dict[str, Any]:
    """The small recipe with keys of its sections replaced; None as a section drops it."""
    value: dict[str, Any] = parse_yaml(SMALL)
    for name, section in sections.items():
        value[name] = {**value.get(name, {}), **section} if isinstance(section, dict) else section
    return value


def problems(value: dict[str, Any]) -> list[str]:
    with pytest.raises(UserError) as caught:
        check_recipe(value, "recipe.yaml")
    assert caught.value.exit_code == 2
    first, *lines = caught.value.problem.split("\n")
    count = "one problem" if len(lines) == 1 else f"{len(lines)} problems"
    assert first == f"recipe.yaml: {count}"
    return [line.strip() for line in lines]


# --------------------------------------------------------------------------------------------------------------- shipped


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_shipped_recipe_is_right(path: Path) -> None:
    recipe = load_recipe(path)
    assert check_recipe(parse_yaml(recipe_yaml(recipe)), "again") == recipe


def test_recipes_are_shipped() -> None:
    assert RECIPES


# ---------------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("optim.learning_rate=2e-5", "optim", "learning_rate", 2e-5),
        ("optim.learning_rate=1E-4", "optim", "learning_rate", 1e-4),
        ("optim.adam_beta2=.95", "optim", "adam_beta2", 0.95),
        ("train.max_steps=2B", "train", "max_steps", 2_000_000_000),
        ("train.max_steps=500M", "train", "max_steps", 500_000_000),
        ("train.max_steps=1_000", "train", "max_steps", 1_000),
        ("train.max_steps=1e3", "train", "max_steps", 1_000),
        ("train.max_steps=010", "train", "max_steps", 10),
        ("train.max_time=3h30m", "train", "max_time", 12_600.0),
        ("train.max_time=90", "train", "max_time", 90.0),
        ("train.seed=9007199254740993", "train", "seed", 2**53 + 1),
        ("train.torch_compile=false", "train", "torch_compile", False),
        ("train.torch_compile=auto", "train", "torch_compile", "auto"),
        ("checkpoint.save_total_limit=null", "checkpoint", "save_total_limit", None),
        ("eval.eval_steps=", "eval", "eval_steps", None),
    ],
)
def test_values(tmp_path: Path, override: str, section: str, key: str, value: object) -> None:
    found = getattr(getattr(load_recipe(write(tmp_path), [override]), section), key)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("train.max_steps=true", "train.max_steps: expected a count such as 500M, 2B or 100_000, got true"),
        (
            "train.global_batch_size=",
            "train.global_batch_size: expected a count such as 500M, 2B or 100_000, got nothing",
        ),
        (
            "train.global_batch_size=[8]",
            "train.global_batch_size: expected a count such as 500M, 2B or 100_000, got [8]",
        ),
        ("train.max_steps=1.5", "train.max_steps: expected a whole number, got 1.5"),
        ("train.max_steps=.inf", "train.max_steps: expected a whole number, got inf"),
        ("train.max_steps=0", "train.max_steps: must be at least 1, got 0"),
        ("train.max_time=12:00:00", "train.max_time: expected a time such as 3h30m or 90s, got '12:00:00'"),
        ("train.max_time=true", "train.max_time: expected a time such as 3h30m or 90s, got true"),
        ("optim.weight_decay=true", "optim.weight_decay: expected a number, got true"),
        ("optim.weight_decay=yes", "optim.weight_decay: expected a number, got 'yes'"),
        ("optim.learning_rate=.inf", "optim.learning_rate: expected a number, got inf"),
        ("optim.learning_rate=.nan", "optim.learning_rate: expected a number, got nan"),
        ("optim.adam_beta1=1", "optim.adam_beta1: input should be less than 1, got 1"),
        ("output_dir=12", "output_dir: expected text, got 12"),
        ("output_dir=2024-01-31", None),
        ("output_dir=on", None),
        ("train.torch_compile=maybe", "train.torch_compile: expected 'auto' or true or false, got 'maybe'"),
        (
            "train.per_device_train_batch_size=many",
            "train.per_device_train_batch_size: expected 'auto' or a count such as 500M, 2B or 100_000, got 'many'",
        ),
        ("deepspeed=3", "deepspeed: expected text or a section of keys, got 3"),
        ("data.sources={path: x}", "data.sources: expected a list, got {'path': 'x'}"),
        ("data.sources=[x]", "data.sources.0: expected a section of keys, got 'x'"),
        ("data.validation_split=1", "data.validation_split: input should be less than 1, got 1"),
        ("parallel.tensor_parallel_size=0", "parallel.tensor_parallel_size: must be at least 1, got 0"),
    ],
)
def test_wrong_values_are_named_and_shown(tmp_path: Path, override: str, problem: str | None) -> None:
    if problem is None:
        load_recipe(write(tmp_path), [override])
        return
    with pytest.raises(UserError) as caught:
        load_recipe(write(tmp_path), [override])
    assert caught.value.problem.split("\n")[1:] == [f"  {problem}"]


def test_every_problem_at_once() -> None:
    value = small(
        model={"config": {"hidden_size": "64x", "num_hidden_layers": 2, "num_attention_heads": 4}},
        data={"sources": [{"path": "a", "wieght": 1}, {"weight": -1, "path": "b"}]},
        train={"max_steps": True},
        optim={"learning_rat": 1e-4, "adam_beta1": 2},
        foo=1,
    )
    del value["output_dir"]
    assert sorted(problems(value)) == sorted(
        [
            "output_dir: is missing",
            "model.config.hidden_size: expected a count such as 500M, 2B or 100_000, got '64x'",
            "model.config.intermediate_size: is missing",
            "data.sources.0.wieght: no such key; did you mean weight?",
            "data.sources.1.weight: input should be greater than or equal to 0, got -1",
            "train.max_steps: expected a count such as 500M, 2B or 100_000, got true",
            "optim.learning_rat: no such key; did you mean learning_rate?",
            "optim.adam_beta1: input should be less than 1, got 2",
            "foo: no such key; known here: output_dir, model, data, train, optim, parallel, checkpoint, log, eval, health, "
            "deepspeed",
        ]
    )


def test_contradictions_all_at_once() -> None:
    value = small(
        model={"model_name_or_path": "base", "config": small()["model"]["config"] | {"num_attention_heads": 5}},
        data={"sources": [{"path": "x/a", "weight": 0}, {"path": "y/a"}]},
        train={"max_tokens": "1M"},
        parallel={"zero_stage": 0},
    )
    found = problems(value)
    assert [line.partition(":")[0] for line in found] == [
        "model",
        "model.config",
        "data.sources",
        "data.sources",
        "train",
        "parallel.zero_stage",
    ]
    assert found[1].startswith("model.config: hidden_size 64 doesn't divide by num_attention_heads 5")
    assert found[2] == "data.sources: 2 sources are called 'a'; give each a name"
    assert found[4].endswith("got max_steps 10 and max_tokens 1000000 (null unsets one)")


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"model": {"config": None}}, "model: give one of model.model_name_or_path (continue) and model.config"),
        ({"model": {"tokenizer": None}}, "model.tokenizer: a new model needs a tokenizer folder"),
        ({"data": {"sources": []}}, "data.sources: give at least one source"),
        ({"data": {"sources": [{"path": "a", "weight": 0}]}}, "data.sources: every weight is 0"),
        (
            {"train": {"max_steps": None}},
            "train: give exactly one of max_steps, max_tokens and num_train_epochs, got none",
        ),
        ({"train": {"num_train_epochs": 1}}, "train: give exactly one of"),
        ({"parallel": {"zero_stage": 0}}, "parallel.zero_stage: 0 with train.precision bf16"),
        (
            {"parallel": {"zero_stage": 0}, "train": {"precision": "fp16"}},
            "parallel.zero_stage: 0 with train.precision fp16",
        ),
        (
            {"model": {"config": small()["model"]["config"] | {"num_key_value_heads": 3}}},
            "model.config: num_attention_heads 4 doesn't divide by num_key_value_heads 3",
        ),
    ],
)
def test_contradictions(sections: dict[str, Any], problem: str) -> None:
    (line,) = problems(small(**sections))
    assert line.startswith(problem)


def test_what_belongs_together_is_right() -> None:
    assert check_recipe(small(parallel={"zero_stage": 0}, train={"precision": "fp32"}), "x").parallel.zero_stage == 0
    shape = {"hidden_size": 60, "head_dim": 16, "num_attention_heads": 7}
    value = small(model={"config": small()["model"]["config"] | shape})
    assert check_recipe(value, "x").model.config is not None
    named = [{"path": "x/a", "name": "one"}, {"path": "y/a"}]
    assert [source.label for source in check_recipe(small(data={"sources": named}), "x").data.sources] == ["one", "a"]


# ------------------------------------------------------------------------------------------------------------------ hints


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("optim.learning_rat", "did you mean learning_rate?"),
        ("optim.LearningRate", "did you mean learning_rate?"),
        ("trian.max_steps", "did you mean train?"),
        ("data.sources.0.wieght", "did you mean weight?"),
        ("train.learning_rate", "learning_rate belongs to optim"),
        ("optim.seq_len", "seq_len belongs to data"),
        ("train.output_dir", "output_dir belongs to the top level"),
        ("model.hidden_size", "hidden_size belongs to model.config"),
        (
            "train.gradient_accumulation_steps",
            "(hf, deepspeed-chat, deepspeed, axolotl) is train.global_batch_size here",
        ),
        ("train.--micro-batch-size", "is train.per_device_train_batch_size here"),
        ("optim.lr", "is optim.learning_rate here"),
        ("model.config.n_layer", "n_layer (litgpt) is model.config.num_hidden_layers here"),
        ("log.colour", "known here: logging_steps, report_to, sample_prompts, sample_steps"),
    ],
)
def test_an_unknown_key_says_where_it_was_meant_to_point(tmp_path: Path, key: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        load_recipe(write(tmp_path), [f"{key}=3"])
    shown = key.partition(".")[0] if key.startswith("trian") else key
    (line,) = [line for line in caught.value.problem.split("\n") if "no such key" in line]
    assert line.startswith(f"  {shown}: no such key; ")
    assert line.endswith(hint)


def test_a_key_that_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"optim\.3: keys should be strings, got 3"):
        load_recipe(write(tmp_path, SMALL + "optim: {3: 4}\n"))


# ------------------------------------------------------------------------------------------------------------------- YAML


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("on", "on"),
        ("yes", "yes"),
        ("NO", "NO"),
        ("true", True),
        ("False", False),
        ("12:00:00", "12:00:00"),
        ("190:20:30", "190:20:30"),
        ("2024-01-31", "2024-01-31"),
        ("1e-4", 1e-4),
        ("1E4", 1e4),
        ("1_000", 1000),
        ("010", 10),
        ("0x10", "0x10"),
        ("+1", 1),
        ("-.5", -0.5),
        ("1.", 1.0),
        ("null", None),
        ("~", None),
        ("=", "="),
        ("<<", "<<"),
        ("'1e-4'", "1e-4"),
    ],
)
def test_scalars(text: str, value: object) -> None:
    found = parse_yaml(f"key: {text}")["key"]
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: 1\nb: 2\na: 3", "the key 'a' stands in line 1 and again in line 3"),
        ("a:\n  b: 1\n  c: {d: 1,\n    d: 2}", "the key 'd' stands in line 3 and again in line 4"),
        ("a: {{ rate }}", "the key in line 1 is a list or a section"),
        ("a: b: c", "line 1, column 5"),
        ("a: [1", "not valid YAML"),
        ("a: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
        ("a: 1\n---\nb: 2", "not valid YAML"),
    ],
)
def test_broken_yaml(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(UserError, match=re.escape(problem)) as caught:
        load_recipe(write(tmp_path, text))
    assert caught.value.problem.startswith(f"{tmp_path / 'recipe.yaml'}: ")


def test_files_that_are_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no recipe at") as caught:
        load_recipe(tmp_path / "none.yaml")
    assert "arriero recipes list" in caught.value.remedy
    with pytest.raises(UserError, match="found nothing"):
        load_recipe(write(tmp_path, "# empty\n"))
    with pytest.raises(UserError, match="found list"):
        load_recipe(write(tmp_path, "- 1\n"))
    path = write(tmp_path)
    path.write_bytes("# 配方\n".encode("gbk"))
    with pytest.raises(UserError, match=r"is not UTF-8: byte 2 is 0xc5"):
        load_recipe(path)


def test_the_command_ends_with_exit_code_2(tmp_path: Path) -> None:
    path = write(tmp_path, SMALL.replace("max_steps", "max_step"))
    script = "import sys; sys.argv = ['arriero', 'train', sys.argv[1], '--dry-run']; from arriero.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {path}: ")
    assert "train.max_step: no such key; did you mean max_steps?" in done.stderr
    assert "Traceback" not in done.stderr


# -------------------------------------------------------------------------------------------------------------- overrides


def test_overrides_nest_index_and_create(tmp_path: Path) -> None:
    recipe = load_recipe(
        write(tmp_path),
        [
            "data.sources.1.weight=0.5",
            "data.sources.0={path: data/c, weight: 1}",
            "optim.learning_rate=2e-4",
            "optim.learning_rate=3e-4",
            "model.config.rope_parameters.rope_theta=5e5",
            "model.config.rope_parameters.rope_type=default",
            "output_dir=runs/a=b",
        ],
    )
    assert [(source.path, source.weight) for source in recipe.data.sources] == [("data/c", 1.0), ("data/b", 0.5)]
    assert recipe.optim.learning_rate == 3e-4
    assert recipe.model.config is not None
    assert recipe.model.config.rope_parameters == {"rope_theta": 5e5, "rope_type": "default"}
    assert recipe.output_dir == "runs/a=b"


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("optim.learning_rate", "'optim.learning_rate' is no override"),
        ("=3", "'=3' is no override"),
        ("optim..x=3", "'optim..x=3' is no override"),
        ("data.sources.2.weight=1", "data.sources is a list with 2 entries"),
        ("data.sources.first.weight=1", "data.sources is a list with 2 entries"),
        ("output_dir.name=x", "output_dir is 'runs/x', not a section"),
        ("train.max_steps=[1", "'train.max_steps=[1': not valid YAML"),
        ("optim={lr: 1, lr: 2}", "'optim={lr: 1, lr: 2}': the key 'lr' stands in line 1 and again in line 1"),
    ],
)
def test_bad_overrides_are_named(tmp_path: Path, override: str, problem: str) -> None:
    with pytest.raises(UserError, match=re.escape(problem)):
        load_recipe(write(tmp_path), [override])


# -------------------------------------------------------------------------------------------------------------- round trip


TRICKY = [
    "08",
    "1e4",
    "1e-4",
    "on",
    "12:00:00",
    "null",
    "~",
    "=",
    "<<",
    "2024-01-31",
    "True",
    "0o7",
    ".5",
    "",
    " a ",
    "\x85",
]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=8)
        | st.from_regex(r"[-+.0-9_eE:xnyo~]{1,8}", fullmatch=True),
        max_size=30,
    )
)
def test_any_text_comes_back_from_a_written_recipe(texts: list[str]) -> None:
    raw = {text: text for text in [*TRICKY, *texts]}
    recipe = check_recipe(small() | {"deepspeed": raw}, "x")
    written = recipe_yaml(recipe)
    assert check_recipe(parse_yaml(written), "again") == recipe
    assert yaml.safe_load(written)["deepspeed"] == raw  # and any other reader agrees


def test_a_written_recipe_holds_every_key() -> None:
    recipe = check_recipe(small(train={"max_steps": None, "max_time": "1h", "num_train_epochs": 0.5}), "x")
    written = parse_yaml(recipe_yaml(recipe))
    assert check_recipe(written, "again") == recipe
    for path in all_keys():
        if path.startswith("data.sources."):
            continue
        inner = written
        for part in path.split("."):
            assert part in inner, path
            inner = inner[part]
    assert {"path", "name", "weight", "max_epochs"} == set(written["data"]["sources"][0])


def test_differing_keys() -> None:
    old, new = (check_recipe(value, "x").model_dump(mode="json") for value in (small(), small()))
    assert differing_keys(old, new) == []
    new = copy.deepcopy(new)
    new["optim"]["learning_rate"] = 1.0
    new["data"]["sources"][0]["weight"] = 1.0
    new["model"]["config"] = None
    del new["train"]["seed"]
    found = differing_keys(old, new)
    assert [path for path, _, _ in found] == ["model.config", "data.sources", "train.seed", "optim.learning_rate"]
    assert found[2:] == [("train.seed", 42, None), ("optim.learning_rate", 3e-4, 1.0)]


def test_a_recipe_can_not_be_changed() -> None:
    recipe = check_recipe(small(), "x")
    with pytest.raises(ValueError, match="frozen"):
        recipe.train.max_steps = 3  # type: ignore[misc]


def test_every_key_says_what_it_means() -> None:
    sections = (schema.Model, schema.ModelShape, schema.Data, schema.Source, schema.Train, schema.Optim)
    sections += (schema.Parallel, schema.Checkpoint, schema.Log, schema.Eval, schema.Health)
    fields = {
        f"{section.__name__}.{name}": field for section in sections for name, field in section.model_fields.items()
    }
    assert not [name for name, field in fields.items() if not field.description]
    assert {name.partition(".")[2] for name in fields} >= {
        path.rpartition(".")[2] for path in all_keys() if "." in path
    }
