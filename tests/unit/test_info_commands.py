"""``keys`` and the table of ``doctor``, as commands."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from arriero.cli import info_commands
from arriero.config.keys import KEY_MAP
from arriero.doctor.finding import Check
from arriero.errors import UserError

RUNNER = CliRunner()


@pytest.fixture(scope="module")
def app() -> typer.Typer:
    whole = typer.Typer()
    whole.command("keys")(info_commands.keys_command)
    whole.command("doctor")(info_commands.doctor_command)
    return whole


def lines(app: typer.Typer, *arguments: str) -> list[dict[str, str]]:
    result = RUNNER.invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    return [json.loads(line) for line in result.stdout.splitlines()]


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
        info_commands.keys_command,
    )
    for command in commands:
        assert "Example: arriero " in (command.__doc__ or "")


def test_nothing_heavy_is_imported() -> None:
    script = (
        "import sys\n"
        "from arriero.cli import info_commands, recipe_commands\n"
        "light = set(sys.modules)\n"
        "assert 'rich' not in light and 'pydantic' not in light\n"
        "recipe_commands.recipes_list(as_json=False)\n"
        "info_commands.keys_command(system='hf', as_json=False)\n"
        "heavy = {'torch', 'transformers', 'numpy', 'deepspeed', 'pydantic', 'yaml'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)
