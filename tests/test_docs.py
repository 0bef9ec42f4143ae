"""What people read is true: the README runs as it stands, what it names exists, and both languages say the same."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer.main

from arriero.cli.main import app

ROOT = Path(__file__).parents[1]
README, CHINESE = ROOT / "README.md", ROOT / "README.zh-CN.md"
PAGES = [README, CHINESE, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
PACKAGE = ROOT / "src" / "arriero"

page = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and whether a ``<!-- test -->`` stands before it."""

    language: str
    text: str
    tested: bool


def blocks(path: Path) -> list[Block]:
    pattern = re.compile(r"^(<!-- test -->\n\n)?```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return [Block(found[2], found[3], bool(found[1])) for found in pattern.finditer(path.read_text(encoding="utf-8"))]


# ------------------------------------------------------------------------------------------------------- the README runs


def run_block(block: Block, folder: Path) -> str:
    """Run one block as a person would who has arriero on their PATH; its output, both streams."""
    command = ["bash", "-euo", "pipefail", "-c", block.text] if block.language == "sh" else [sys.executable, "-"]
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    environment |= {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        # Two OpenMP threads on two cores of which one is busy take up to nine times as long as one.
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        command,
        input=block.text if block.language == "python" else None,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{block.text}\n{done.stdout[-4000:]}"
    return done.stdout


def test_the_readme_runs_as_it_stands(tmp_path: Path) -> None:
    tested = [block for block in blocks(README) if block.tested]
    assert [block.language for block in tested] == ["sh"] * 9 + ["python"]
    said = "".join(run_block(block, tmp_path) for block in tested)
    # What the text around the blocks says of them.
    assert "60 of 2.05k tokens" in said, "the dry run's plan"
    assert (tmp_path / "runs/first/final/config.json").is_file()
    assert re.search(r"^runs/first/report\.html: 7 logged steps, 0\.\d\d MB$", said, re.MULTILINE)
    before, after = re.findall(r"eval step (?:0|60) .* bits_per_byte ([\d.]+)", said)
    assert float(after) < float(before) - 0.3
    assert (tmp_path / "my-model/model.safetensors").is_file()
    assert len(list((tmp_path / "my-model-gguf").glob("*.gguf"))) == 1
    assert (tmp_path / "my-model-universal/latest_universal").read_text() == "global_step60"
    assert re.search(r"^import", said, re.MULTILINE), "the generated text begins with its prompt"
    assert re.search(r'^\{"id":"cmpl-.*"text":".*"usage":\{', said, re.MULTILINE), "what curl was answered"
    stopped, finished = re.findall(r"stop step (\d+) +status (\w+)", said)[-2:]
    assert stopped[1] == "stopped"
    assert int(stopped[0]) < 20
    assert f"resume step {stopped[0]} " in said
    assert finished == ("20", "completed")
    first_loss = float(re.findall(r"loss of the first batch: ([\d.]+)", said)[0])
    assert first_loss < 7.5, "a new model of 4,096 tokens has ln 4096 = 8.3"


# ----------------------------------------------------------------------------------------------- what is named exists


def commands() -> tuple[dict[str, Any], set[str]]:
    """Every command by its words, and the names of groups."""
    found: dict[str, Any] = {}
    groups: set[str] = set()

    def walk(command: Any, words: list[str]) -> None:
        inner = getattr(command, "commands", None)
        if inner is None:
            found[" ".join(words)] = command
            return
        groups.add(" ".join(words))
        for name, one in inner.items():
            walk(one, [*words, name])

    walk(typer.main.get_command(app), [])
    return found, groups


def mentions(text: str) -> Iterator[tuple[str, list[str]]]:
    """(what is written, its words after ``arriero``) for each command in a code span or a code block."""
    fenced = re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))
    lines = [line for block in fenced for line in block.replace("\\\n", " ").splitlines()]
    for line in [*lines, *spans]:
        for found in re.finditer(r"(?:^|[\s/;&|])(?:-m )?arriero ((?:--)?[a-z][^|;&#]*)", line):
            yield found[0].strip(), found[1].split()


@page
def test_every_command_named_in_the_docs_exists(page: Path) -> None:
    known, groups = commands()
    top_options = {"--help", "--version"}
    wrong = []
    for written, words in mentions(page.read_text(encoding="utf-8")):
        if words[0] in top_options:
            continue
        depth = 2 if words[0] in groups else 1
        name = " ".join(words[:depth])
        if name in groups or name == "COMMAND":
            continue
        if name not in known:
            wrong.append(f"{written}: there is no {name}")
            continue
        options = {
            option for parameter in known[name].params for option in (*parameter.opts, *parameter.secondary_opts)
        }
        for word in words[depth:]:
            option = word.partition("=")[0]
            if re.fullmatch(r"--[a-z][a-z-]*", option) and option not in options | {"--help"}:
                wrong.append(f"{written}: {name} has no {option}")
    assert not wrong, "\n".join(wrong)


def test_commands_are_found_where_they_are_named() -> None:
    """The reader above is not blind: in the README it finds each command of the road, and it notices a wrong one."""
    named = {" ".join(words[:2]) for _, words in mentions(README.read_text(encoding="utf-8"))}
    for command in ("tokenizer train", "prepare corpus", "data show", "train recipe.yaml", "generate my-model"):
        assert command in named
    assert list(mentions("see `arriero fly`\n\n```sh\ncd x && arriero prepare a \\\n  --wings 2\n```\n")) == [
        ("&& arriero prepare a    --wings 2".removeprefix("&& "), ["prepare", "a", "--wings", "2"]),
        ("arriero fly", ["fly"]),
    ]


@page
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    local = [target for target in targets if not re.match(r"[a-z]+:", target)]
    assert not [target for target in local if not (page.parent / target).exists()]


@page
def test_files_that_are_named_exist(page: Path) -> None:
    """Paths of this project in code spans: with their folder, or as the map has them, below src/arriero."""
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"`((?:src|tests|docs|examples|benchmarks)/[\w./-]+|[\w/]+\.py)`", text)
    missing = [
        name
        for name in named
        if not any((place / name).exists() for place in (ROOT, PACKAGE, PACKAGE / "cli", ROOT / "docs"))
    ]
    assert not missing


def test_the_readme_maps_every_module() -> None:
    modules = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if not path.name.startswith("_")}
    for readme in (README, CHINESE):
        rows = [
            line.split("|")[1] for line in readme.read_text(encoding="utf-8").splitlines() if line.startswith("| `")
        ]
        mapped = [name for row in rows for name in re.findall(r"`([\w/]+\.py)`", row)]
        assert sorted(mapped) == sorted(modules)


# ------------------------------------------------------------------------------------------------ the pages agree


def test_both_readmes_have_the_same_blocks() -> None:
    assert blocks(README) == blocks(CHINESE)


def test_both_readmes_have_the_same_shape() -> None:
    """As many headings of each level, rows of tables and links, in the same order."""

    def shape(path: Path) -> list[str]:
        plain = re.sub(r"^```.*?^```$", "```", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        lines = [line for line in plain.splitlines() if line]
        return [found[1] for line in lines if (found := re.match(r"(#+ |\| |- |```|<!-- test -->)", line))]

    def links(path: Path) -> list[str]:
        found = re.findall(r"\]\(([^)]+)\)", path.read_text(encoding="utf-8"))
        return sorted(target for target in found if not target.startswith("README"))

    assert shape(README) == shape(CHINESE)
    assert links(README) == links(CHINESE)


def test_the_recipe_page_is_what_the_schema_says() -> None:
    spec = importlib.util.spec_from_file_location("make_recipe_page", ROOT / "docs" / "make_recipe_page.py")
    assert spec is not None
    assert spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    written = (ROOT / "docs" / "recipe.md").read_text(encoding="utf-8")
    assert written == maker.render(), "run `make docs`"
    from arriero.config.load import all_keys

    for key in all_keys():
        assert f"| `{key.rsplit('.', 1)[-1]}` |" in written


def test_the_article_page_runs(tmp_path: Path) -> None:
    """Its blocks, in order, in one process: data, then samplers."""
    (tmp_path / "corpus").mkdir()
    for number in range(200):
        text = "\n".join(
            f"document {number}, line {line}: the mule carries {number * line} loads" for line in range(12)
        )
        (tmp_path / "corpus" / f"{number}.txt").write_text(text, encoding="utf-8")
    run_block(Block("sh", "arriero tokenizer train corpus --vocab-size 400 --out tokenizer", True), tmp_path)
    tested = [block for block in blocks(ROOT / "docs" / "article.md") if block.tested]
    assert tested
    script = "\n".join(block.text for block in tested)
    said = run_block(Block("python", script, True), tmp_path)
    assert re.search(r"^(\d+) rows to train on, (\d+) to evaluate on$", said, re.MULTILINE)


def test_the_scale_page_runs(tmp_path: Path) -> None:
    """Three machines' commands, one after the other, against one machine's; what needs a scheduler is at least a script."""
    page = blocks(ROOT / "docs" / "scale.md")
    scripts = [block.text for block in page if block.language == "sh"]
    (tmp_path / "corpus").mkdir()
    for number in range(60):
        text = "\n".join(f"document {number}, line {line}: {number * line} loads" for line in range(12))
        (tmp_path / "corpus" / f"{number}.txt").write_text(text, encoding="utf-8")
    alone = "arriero prepare corpus/ --tokenizer runs/tokenizer --out data/alone\n"
    train = "arriero tokenizer train corpus --vocab-size 400 --out runs/tokenizer\n"
    run_block(
        Block("sh", train + scripts[0] + alone + "cmp data/corpus/dataset.json data/alone/dataset.json", True), tmp_path
    )
    for script in scripts:
        checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
        assert not checked.stderr, script
    (python,) = [block.text for block in page if block.language == "python"]
    compile(python, "clean.py", "exec")


def test_a_task_of_slurm_takes_the_shard_of_its_number(tmp_path: Path) -> None:
    """The quoting of the page, with an `srun` that starts its tasks one after the other, as far as a shell can tell."""
    (script,) = [block.text for block in blocks(ROOT / "docs" / "scale.md") if "SLURM_NTASKS" in block.text]
    (tmp_path / "srun").write_text(
        '#!/bin/bash\nexport SLURM_NTASKS="${1#--ntasks=}"; shift\n'
        'for ((SLURM_PROCID = 0; SLURM_PROCID < SLURM_NTASKS; SLURM_PROCID++)); do export SLURM_PROCID; "$@"; done\n'
    )
    (tmp_path / "arriero").write_text('#!/bin/bash\necho "${@: -1}"\n')
    for name in ("srun", "arriero"):
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CORPUS": "c", "TOKENIZER": "t", "DATASET": "d"}
    done = subprocess.run(["bash", "-eu", "-c", script], capture_output=True, text=True, env=environment)
    assert done.stdout.split() == [*(f"{number}/64" for number in range(64)), "--merge"], done.stderr


def test_the_makefile_has_the_targets_that_are_named() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    assert targets >= {"demo", "test", "check", "fix", "bench", "docs"}
    named = {name for path in PAGES for name in re.findall(r"\bmake ([a-z]+)\b", " ".join(code_of(path)))}
    assert named <= targets
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert "make test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def code_of(path: Path) -> list[str]:
    """Code spans and blocks of a page."""
    text = path.read_text(encoding="utf-8")
    return [*re.findall(r"`([^`\n]+)`", text), *(block.text for block in blocks(path))]
