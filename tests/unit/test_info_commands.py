"""``recipes``, ``keys`` and the table of ``doctor``, as commands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from arriero.cli import info_commands
from arriero.config.keys import KEY_MAP
from arriero.doctor import Check
from arriero.errors import UserError

RUNNER = CliRunner()


@pytest.fixture(scope="module")
def app() -> typer.Typer:
    whole, recipes = typer.Typer(), typer.Typer()
    whole.command("keys")(info_commands.keys_command)
    recipes.command("list")(info_commands.recipes_list)
    recipes.command("show")(info_commands.recipes_show)
    recipes.command("copy")(info_commands.recipes_copy)
    whole.add_typer(recipes, name="recipes")
    return whole


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package folder with two recipes and a file that is none."""
    folder = tmp_path / "package" / "recipes"
    (folder / "demo").mkdir(parents=True)
    (folder / "demo" / "tiny.yaml").write_text("# A tiny model. 数据\n# more\ntrain: {}\n", encoding="utf-8")
    (folder / "bare.yaml").write_text("train: {}\n")
    (folder / "README.md").write_text("# not a recipe\n")
    monkeypatch.setattr(info_commands.resources, "files", lambda package: folder.parent)
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

    root = Path(info_commands.__file__).parents[1] / "recipes"
    listed = {entry["name"]: entry["description"] for entry in lines(app, "recipes", "list")}
    assert set(listed) == {path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*.yaml")}
    for name, description in listed.items():
        assert description, f"{name} begins with no comment"
        load_recipe(root / f"{name}.yaml")


def test_keys_of_one_system(app: typer.Typer) -> None:
    entries = lines(app, "keys", "megatron")
    assert {entry["system"] for entry in entries} == {"megatron"}
    assert {
        "key": "train.per_device_train_batch_size",
        "system": "megatron",
        "name": "--micro-batch-size",
        "note": "",
    } in entries
    table = RUNNER.invoke(app, ["keys", "megatron"]).stdout
    assert "--micro-batch-size" in table
    assert "absolute there, a share of learning_rate here" in table
    assert "local_batch_size" not in table


def test_keys_of_all_systems(app: typer.Typer) -> None:
    assert {entry["key"] for entry in lines(app, "keys")} == set(KEY_MAP)
    table = RUNNER.invoke(app, ["keys"]).stdout
    assert all(key in table for key in KEY_MAP)
    assert "torchtitan: optimizer.param_groups[].optimizer_kwargs.lr" in table


def test_keys_of_an_unknown_system(app: typer.Typer) -> None:
    with pytest.raises(UserError, match="'megatorn'") as caught:
        RUNNER.invoke(app, ["keys", "megatorn"], catch_exceptions=False)
    assert "did you mean megatron?" in caught.value.remedy


def test_table_of_checks(capsys: pytest.CaptureFixture[str]) -> None:
    long_remedy = "pip install " + " ".join(f"'package-{number}>=1'" for number in range(30))
    checks = [
        Check("torch", True, "2.13.0 [cpu]"),
        Check("host name", False, "loopback", "export X=1", required=False),
        Check("packages", False, "old", long_remedy),
    ]
    info_commands._print_checks(checks, ok=False)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split() == ["ok", "torch", "2.13.0", "[cpu]"]
    assert [line.split()[0] for line in printed[1:3]] == ["note", "fail"]
    assert long_remedy in printed  # on one line, to be copied
    assert printed.index("packages:") < printed.index("host name:")
    assert printed[-1].startswith("1 of 3 checks failed")
    info_commands._print_checks(checks[:2], ok=True)
    assert capsys.readouterr().out.splitlines()[-1] == "This machine can train."


def test_every_command_shows_an_example() -> None:
    commands = (
        info_commands.doctor_command,
        info_commands.recipes_list,
        info_commands.recipes_show,
        info_commands.recipes_copy,
        info_commands.keys_command,
    )
    for command in commands:
        assert "Example: arriero " in (command.__doc__ or "")


def test_nothing_heavy_is_imported() -> None:
    script = (
        "import sys\n"
        "from arriero.cli import info_commands\n"
        "light = set(sys.modules)\n"
        "assert 'rich' not in light and 'pydantic' not in light\n"
        "info_commands.recipes_list(as_json=False)\n"
        "info_commands.keys_command(system='hf', as_json=False)\n"
        "heavy = {'torch', 'transformers', 'numpy', 'deepspeed', 'pydantic', 'yaml'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)
