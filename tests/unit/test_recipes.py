"""Shipped recipes: what they say they cost is what the planner says, and each passes a dry run."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from arriero.cli.main import app
from arriero.config.load import load_recipe
from arriero.errors import UserError
from arriero.planner.header import CPU_LAYOUTS, MEMORY_SCORE, SPEED_SCORE, TENSOR_SCORE

ROOT = Path(__file__).parents[2]


def _maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_recipe_headers", ROOT / "docs" / "make_recipe_headers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


MAKER = _maker()
every = pytest.mark.parametrize("name", sorted(MAKER.TARGETS))


def dry_run(*arguments: object) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["train", *map(str, arguments), "--dry-run", "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders with the configuration that each hub name has, and nothing else: no weights, no tokenizer."""
    from transformers import AutoConfig

    folder = tmp_path_factory.mktemp("hub")
    for name, shape in MAKER.HUB.items():
        values = {key: value for key, value in shape.model_dump(exclude_unset=True).items() if key != "model_type"}
        AutoConfig.for_model(shape.model_type, max_position_embeddings=131_072, **values).save_pretrained(folder / name)
    return folder


def test_every_recipe_has_a_machine() -> None:
    shipped = {path.relative_to(MAKER.RECIPES).with_suffix("").as_posix() for path in MAKER.RECIPES.rglob("*.yaml")}
    assert shipped == {*MAKER.TARGETS, "demo/tiny_cpu"}


@every
def test_a_recipe_opens_with_what_it_costs_today(name: str) -> None:
    text = (MAKER.RECIPES / f"{name}.yaml").read_text(encoding="utf-8")
    assert text == MAKER.render(name), "run `make docs`"
    planner, one = MAKER.forecast(name)
    assert one.fits
    assert one.memory.total < 0.93 * planner.machine.device.memory_bytes, "room for a plan that errs by a few percent"


def test_the_page_says_the_same() -> None:
    assert MAKER.PAGE.read_text(encoding="utf-8") == MAKER.page(), "run `make docs`"


def test_how_sure_is_what_was_scored() -> None:
    page = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (\S+) \| LLaMA, (\w+) parallel.*? \| .*? \| (\d+) \| (.+?) \| (.+?) \|$", page, re.MULTILINE
    )
    scores: dict[tuple[str, str], tuple[int, str, str]] = {}
    for quantity, kind, count, median, most in rows:
        scores.setdefault((quantity, kind), (int(count), median, most))  # those that were fitted come first
    assert scores["tokens/s", "data"] == SPEED_SCORE
    assert scores["memory", "data"] == MEMORY_SCORE
    assert scores["tokens/s", "tensor"] == TENSOR_SCORE
    assert f"{CPU_LAYOUTS} of {CPU_LAYOUTS} layouts within 5 % of the memory" in " ".join(page.split())


@every
def test_a_recipe_passes_a_dry_run(name: str, hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with neither GPU nor data nor weights: by shapes alone, and what is missing is listed."""
    monkeypatch.chdir(tmp_path)
    path, target = MAKER.RECIPES / f"{name}.yaml", MAKER.TARGETS[name]
    recipe = load_recipe(path)
    model = recipe.model.model_name_or_path
    changed = [] if model is None else [f"model.model_name_or_path={hub / model}"]
    plan = dry_run(path, *changed, "--nproc", target.gpus)
    planner, _ = MAKER.forecast(name)
    assert plan["parameters"] == pytest.approx(planner.parameters, rel=1e-4)  # Qwen3 has norms of heads besides
    assert plan["dp"] * plan["per_device_train_batch_size"] * plan["gradient_accumulation_steps"] == (
        recipe.train.global_batch_size
    )
    assert plan["steps"] == -(-(recipe.train.max_tokens or 0) // plan["tokens_per_step"])
    assert plan["ds_config"]["zero_optimization"]["stage"] == recipe.parallel.zero_stage
    assert plan["epochs"] == {}
    absent = [line.partition(":")[0] for line in plan["missing"]]
    source = recipe.data.sources[0].path
    assert absent == ([str(hub / model), str(hub / model), source] if model else [recipe.model.tokenizer, source])


def test_a_dry_run_needs_what_sizes_depend_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = MAKER.RECIPES / "llama3_2_1b/scratch_8xh100.yaml"
    for changes, problem in (
        (["model.config.vocab_size=null"], "depends on its tokenizer's"),
        (["train.max_tokens=null", "train.num_train_epochs=1"], "when the data is there"),
    ):
        with pytest.raises(UserError, match=problem):
            dry_run(path, *changes, "--nproc", 8)


def test_a_dry_run_as_text_ends_with_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = MAKER.RECIPES / "llama3_2_1b/scratch_8xh100.yaml"
    said = CliRunner().invoke(app, ["train", str(path), "--dry-run", "--nproc", "8"], catch_exceptions=False).stdout
    assert "epochs         unknown, as the data is\n" in said
    last = said.splitlines()[-3:]
    assert last[0].startswith("not there yet  work/tokenizer: no tokenizer there; arriero tokenizer train TEXT")
    assert last[1] == "not there yet  work/data: arriero prepare TEXT --tokenizer work/tokenizer --out work/data"
    assert "training would not start" in last[2]
