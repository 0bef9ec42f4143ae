"""``recipes list``, ``show``, ``copy`` and ``new``, as commands."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from arriero.cli import recipe_commands
from arriero.cli.main import app as whole
from arriero.errors import UserError

RUNNER = CliRunner()


@pytest.fixture
def app() -> typer.Typer:
    return whole


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package folder with two recipes and a file that is none."""
    folder = tmp_path / "package" / "recipes"
    (folder / "demo").mkdir(parents=True)
    (folder / "demo" / "tiny.yaml").write_text("# A tiny model. 数据\n# more\ntrain: {}\n", encoding="utf-8")
    (folder / "bare.yaml").write_text("train: {}\n")
    (folder / "README.md").write_text("# not a recipe\n")
    monkeypatch.setattr(recipe_commands.resources, "files", lambda package: folder.parent)
    return folder


def lines(app: typer.Typer, *arguments: str) -> list[dict[str, str]]:
    result = RUNNER.invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_list_and_show(app: typer.Typer, shipped: Path) -> None:
    assert lines(app, "recipes", "list") == [
        {"name": "bare", "description": ""},
        {"name": "demo/tiny", "description": "A tiny model. 数据"},
    ]
    table = RUNNER.invoke(app, ["recipes", "list"]).stdout
    assert "demo/tiny  A tiny model. 数据" in table
    shown = RUNNER.invoke(app, ["recipes", "show", "demo/tiny.yaml"])
    assert shown.stdout == (shipped / "demo" / "tiny.yaml").read_text(encoding="utf-8")


def test_unknown_recipe(app: typer.Typer, shipped: Path) -> None:
    with pytest.raises(UserError, match="'demo/tyny'") as caught:
        RUNNER.invoke(app, ["recipes", "show", "demo/tyny"], catch_exceptions=False)
    assert caught.value.remedy.startswith("did you mean demo/tiny?")
    assert caught.value.exit_code == 2


def test_copy_to_a_file_and_into_a_folder(app: typer.Typer, shipped: Path, tmp_path: Path) -> None:
    text = (shipped / "demo" / "tiny.yaml").read_text(encoding="utf-8")
    copied = RUNNER.invoke(app, ["recipes", "copy", "demo/tiny", str(tmp_path / "new" / "my.yaml")])
    assert copied.exit_code == 0
    assert (tmp_path / "new" / "my.yaml").read_text(encoding="utf-8") == text
    assert f"arriero train {tmp_path / 'new' / 'my.yaml'}" in copied.stdout.replace("\n", " ")
    RUNNER.invoke(app, ["recipes", "copy", "demo/tiny", str(tmp_path)])
    assert (tmp_path / "tiny.yaml").read_text(encoding="utf-8") == text


def test_copy_never_overwrites(app: typer.Typer, shipped: Path, tmp_path: Path) -> None:
    mine = tmp_path / "my.yaml"
    mine.write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        RUNNER.invoke(app, ["recipes", "copy", "demo/tiny", str(mine)], catch_exceptions=False)
    assert mine.read_text() == "mine"
    with pytest.raises(UserError, match="can't be written"):
        RUNNER.invoke(app, ["recipes", "copy", "demo/tiny", str(mine / "below")], catch_exceptions=False)


def test_what_is_really_shipped(app: typer.Typer) -> None:
    """Every packaged recipe is listed, says what it is, and parses."""
    from arriero.config.load import load_recipe

    root = Path(recipe_commands.__file__).parents[1] / "recipes"
    listed = {entry["name"]: entry["description"] for entry in lines(app, "recipes", "list")}
    assert set(listed) == {path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*.yaml")}
    for name, description in listed.items():
        assert description, f"{name} begins with no comment"
        load_recipe(root / f"{name}.yaml")


# ------------------------------------------------------------------------------------------------------- recipes new


def run(*arguments: object, answers: str | None = None) -> str:
    done = RUNNER.invoke(whole, [*map(str, arguments)], input=answers, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """300 short documents, and the working directory beside them."""
    monkeypatch.chdir(tmp_path)
    # A dry run asks the hub for a tokenizer whose folder isn't there: 40 s of attempts where there is no network.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    rows = [{"text": f"document {n}: the mule carries {n * 7} loads over pass {n % 13}\n" * 30} for n in range(300)]
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "mules.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_new_recipe_and_the_commands_that_follow(corpus: Path) -> None:
    """For this machine's CPU: what it says comes next, done as it says, ends in a dry run that misses nothing."""
    said = run("recipes", "new", "mules.yaml", "--data", "corpus", "--size", "1M")
    text = Path("mules.yaml").read_text(encoding="utf-8")
    head = text.split("output_dir")[0]
    assert head.startswith("# A new model of 1")
    assert "# Planned: " in head
    assert "How sure: memory of 31 layouts" in head
    commands = [line.split()[1:] for line in said.splitlines() if line.startswith("  arriero ")]
    assert [command[:2] for command in commands] == [
        ["tokenizer", "train"],
        ["prepare", "corpus"],
        ["train", "mules.yaml"],
        ["train", "mules.yaml"],
    ]
    before = json.loads(run(*commands[2], "--json"))
    assert len(before["missing"]) == 2
    commands[0][commands[0].index("--vocab-size") + 1] = "400"  # a text this small has no 8,192 tokens
    for command in commands[:2]:
        run(*command)
    after = json.loads(run(*commands[2], "--json"))
    assert after["missing"] == []
    assert (after["parameters"], after["steps"]) == (before["parameters"], before["steps"])
    assert 1 <= after["epochs"]["corpus"] <= 5, "four passes, by an estimate of the text's tokens"
    # Asked again, now that there are a tokenizer and a dataset, it counts instead of guessing.
    again = run(
        "recipes", "new", "again.yaml", "--data", "work/corpus", "--size", "1M", "--tokenizer", "work/tokenizer"
    )
    assert [line.split()[1] for line in again.splitlines() if line.startswith("  arriero ")] == ["train", "train"]
    exact = json.loads(run("train", "again.yaml", "--dry-run", "--json"))
    assert exact["epochs"]["corpus"] == pytest.approx(4, rel=0.05)


def test_what_follows_can_be_pasted_and_goes_over_the_hosts_that_it_needs(corpus: Path) -> None:
    shutil.copytree("corpus", "my text")
    said = run("recipes", "new", "my recipe.yaml", "--data", "my text", "--size", "1B", "--gpu", "h100", "--gpus", 16)
    assert "  arriero prepare 'my text' --tokenizer work/tokenizer --out 'work/my text'" in said
    assert said.splitlines()[-1] == "  arriero launch 'my recipe.yaml' --hostfile hostfile"


def test_a_shape_that_is_no_text(corpus: Path) -> None:
    Path("config.json").write_bytes(b"\x96\xff")
    with pytest.raises(UserError, match="--config: can't read"):
        RUNNER.invoke(
            whole, ["recipes", "new", "x.yaml", "--data", "corpus", "--config", "config.json"], catch_exceptions=False
        )


def test_a_new_recipe_for_other_gpus(corpus: Path) -> None:
    from arriero.config.load import load_recipe

    said = run("recipes", "new", "big.yaml", "--data", "corpus", "--size", "1B", "--gpu", "h100", "--gpus", 8, "--tokens", "20B")  # fmt: skip
    recipe = load_recipe("big.yaml")
    assert "8 × H100-SXM" in said
    assert said.splitlines()[-1] == "  arriero train big.yaml --nproc 8"
    assert recipe.train.max_tokens == 20_000_000_000
    assert recipe.train.global_batch_size * recipe.data.seq_len == 2**20
    assert recipe.parallel.replica_ranks == 1
    plan = json.loads(run("plan", "big.yaml", "--gpu", "h100", "--gpus", 8, "--json"))
    own = next(layout for layout in plan["layouts"] if layout["recipe"])
    assert own["fits"]
    assert own["tokens_per_second"] >= 0.9 * max(one["tokens_per_second"] for one in plan["layouts"] if one["fits"])
    assert 0.9e9 < plan["parameters"] < 1.1e9


def test_a_new_recipe_that_continues_a_model(corpus: Path) -> None:
    from transformers import LlamaConfig

    from arriero.config.load import load_recipe

    LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128_256, max_position_embeddings=2048,
    ).save_pretrained("llama")  # fmt: skip
    said = run("recipes", "new", "more.yaml", "--data", "corpus", "--model", "llama", "--gpu", "4090", "--gpus", 2)
    recipe = load_recipe("more.yaml")
    assert recipe.model.model_name_or_path == "llama"
    assert recipe.parallel.offload_optimizer == "cpu", "16 bytes a parameter don't fit into two times 24 GiB"
    assert recipe.data.seq_len == 2048
    assert recipe.optim.learning_rate == 3e-5
    assert "no published run with offload could be scored" in said


def test_a_new_recipe_of_a_given_shape(corpus: Path) -> None:
    """A config.json of Transformers', or LlamaConfig's keys in YAML; both give the same model."""
    from transformers import LlamaConfig

    from arriero.config.load import load_recipe

    keys = {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 500,
    }
    LlamaConfig(**keys, rms_norm_eps=1e-6).save_pretrained("shape")
    Path("shape.yaml").write_text("".join(f"{key}: {value}\n" for key, value in keys.items()))
    for name, given in (("a", "shape"), ("b", "shape/config.json"), ("c", "shape.yaml")):
        run("recipes", "new", f"{name}.yaml", "--data", "corpus", "--config", given, "--tokens", "50k")
        shape = load_recipe(f"{name}.yaml").model.config
        assert shape is not None
        assert {key: getattr(shape, key) for key in keys} == keys
        assert shape.rms_norm_eps == (1e-5 if name == "c" else 1e-6)
    Path("wrong.yaml").write_text("hidden_size: 64\n")
    with pytest.raises(UserError, match="doesn't describe a LLaMA-like model"):
        RUNNER.invoke(
            whole, ["recipes", "new", "x.yaml", "--data", "corpus", "--config", "wrong.yaml"], catch_exceptions=False
        )


def test_what_isn_t_given_is_asked_for_on_a_terminal(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe_commands, "_at_terminal", lambda: True)
    run("recipes", "new", "asked.yaml", answers="corpus\n1M\n\n50k\n")
    assert "max_tokens: 50k" in Path("asked.yaml").read_text()
    monkeypatch.setattr(recipe_commands, "_ask_model", lambda: pytest.fail("asked for what was given"))
    run("recipes", "new", "given.yaml", "--size", "1M", "--data", "corpus", answers="\n50k\n")
    text = [line for line in Path("given.yaml").read_text().splitlines() if not line.startswith(("#", "output_dir"))]
    assert text == [
        line for line in Path("asked.yaml").read_text().splitlines() if not line.startswith(("#", "output_dir"))
    ]


def test_what_a_new_recipe_can_t_be_made_of(corpus: Path) -> None:
    for arguments, problem in (
        ([], "no --data is given"),
        (["--data", "corpus"], "Neither --model nor --size nor --config"),
        (["--data", "corpus", "--size", "many"], "--size many: expected a count"),
        (["--data", "nowhere", "--size", "1M"], "nowhere"),
        (["--data", "corpus", "--size", "1M", "--model", "x"], "Give one of them"),
        (["--data", "corpus", "--size", "1M", "--tokenizer", "./none"], "there is no tokenizer at"),
        (["--data", "corpus", "--size", "70B", "--gpu", "4090", "--gpus", "1"], "nothing fits"),
        (["--data", "corpus", "--size", "100k"], "can't be made"),
    ):
        with pytest.raises(UserError) as caught:
            RUNNER.invoke(whole, ["recipes", "new", "x.yaml", *arguments], catch_exceptions=False)
        assert problem in str(caught.value)
        assert not Path("x.yaml").exists()
    Path("x.yaml").write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        RUNNER.invoke(whole, ["recipes", "new", "x.yaml"], catch_exceptions=False)


@pytest.mark.parametrize("size", ["3M", "60M", "125M", "350M", "1B", "3B", "8B", "13B", "70B"])
def test_sizes_are_met(size: str) -> None:
    from arriero.new_recipe import shape_of_size
    from arriero.planner.arithmetic import parameter_count
    from arriero.units import parse_count

    wanted = parse_count(size)
    vocab_size = 8192 if wanted < 30e6 else 32_768 if wanted < 2e9 else 131_072
    shape = shape_of_size(wanted, vocab_size)
    assert parameter_count(shape, vocab_size) == pytest.approx(wanted, rel=0.1)
    assert 20 < shape.hidden_size / shape.num_hidden_layers < 140
    assert shape.num_attention_heads % (shape.num_key_value_heads or 1) == 0
