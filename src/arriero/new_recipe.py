"""A small recipe for somebody's own machine and text: shape, batch, schedule and layout chosen, and said why.

The layout is the planner's best, the length 20 tokens a parameter (Hoffmann et al. 2022, arXiv:2203.15556) but at most
four passes over the text (Muennighoff et al. 2023, arXiv:2305.16264), the learning rate that of published models.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from arriero.config.load import check_recipe, commented_yaml
from arriero.config.schema import Model, ModelShape
from arriero.data.shards import dataset_exists, is_dataset, open_dataset
from arriero.data.sources import list_files
from arriero.data.tokenizer import has_tokenizer, load_tokenizer
from arriero.errors import UserError
from arriero.planner.arithmetic import divisors, parameter_count
from arriero.planner.header import certainty, cost_line
from arriero.planner.plan import Forecast, Planner, plan
from arriero.planner.shape import shape_of_model
from arriero.resolve import outline, resolve
from arriero.units import format_count, parse_count

# (width, layers) of models that people have trained: from a toy over GPT-2's and Llama 3's sizes to 70B.
_LADDER = (
    *((128, 4), (192, 4), (256, 6), (384, 6), (512, 8), (640, 10), (768, 12), (1024, 24), (1536, 24), (2048, 20)),
    *((2560, 32), (3072, 28), (4096, 32), (5120, 40), (6656, 60), (8192, 80)),
)
# Highest learning rate by parameters: Llama 3 (405B 8e-5, 70B 1.5e-4, 8B 3e-4), TinyLlama (1B 4e-4), GPT-3's 125M.
_RATES = ((30e6, 2e-3), (600e6, 6e-4), (3e9, 4e-4), (30e9, 3e-4), (math.inf, 1.5e-4))
_VOCABULARIES = ((30e6, 8_192), (2e9, 32_768), (math.inf, 131_072))
_ROWS = ((30e6, 512), (300e6, 1024), (3e9, 2048), (math.inf, 4096))
_TOKENS_PER_PARAMETER, _MOST_PASSES = 20, 4
_BYTES_PER_TOKEN = 4  # of English with 32k tokens; 3 to 5 with others
_STEPS = 5_000  # that a step's tokens are chosen for, between 8 thousand and a million
_FILL = 0.9  # of the device: plans err by a few percent
_SIMPLER = 1.1  # a layout of data parallelism alone is taken if it takes at most this much longer
_SAVE_EVERY_S = 1_800.0
# Written where they say something.
_LAYOUT_KEYS = (
    "offload_optimizer",
    "offload_param",
    "tensor_parallel_size",
    "sequence_parallel_size",
    "pipeline_parallel_size",
)


@dataclass(frozen=True)
class Wish:
    """What is to be trained, on what, where. None: to be chosen here."""

    data: tuple[str, ...]
    """Prepared datasets, or files, folders and globs of text, or hf:// names."""
    tokenizer: str | None = None
    model: str | None = None
    """The folder or hub name of a model to continue; else ``shape`` or ``parameters`` of a new one."""
    shape: ModelShape | None = None
    parameters: int | None = None
    tokens: int | None = None
    gpu: str | None = None
    gpus: int | None = None


@dataclass(frozen=True)
class NewRecipe:
    """The recipe's text, what it costs, and the commands that come next."""

    text: str
    cost: str
    certainty: str
    commands: tuple[str, ...]


@dataclass(frozen=True)
class _Text:
    """Where a source's rows come from."""

    path: str
    """Of the dataset, there already or to be made."""
    made_from: str | None
    tokens: int | None


def new_recipe(wish: Wish, out: Path) -> NewRecipe:
    """A recipe that ``arriero train --dry-run`` takes, to be written to ``out``.

    Raises ``UserError`` where a choice is left open, an input can't be read, or no layout fits into the machine.
    """
    sources = [_source(name) for name in wish.data]
    known = None if any(source.tokens is None for source in sources) else sum(source.tokens or 0 for source in sources)
    model, shape, vocab_size, made_tokenizer = _model(wish, sources)
    parameters = parameter_count(shape, vocab_size)
    tokens, length_note = _length(wish, parameters, known)
    seq_len = next(rows for size, rows in _ROWS if parameters <= size)
    seq_len = min(seq_len, shape.max_position_embeddings or seq_len)
    step_tokens = 2 ** round(math.log2(min(max(tokens / _STEPS, 2**13), 2**20)))
    value: dict[str, Any] = {
        "output_dir": f"runs/{out.stem}",
        "model": model,
        "data": {"sources": [{"path": source.path} for source in sources], "seq_len": seq_len},
        "train": {"global_batch_size": max(step_tokens // seq_len, 1), "max_tokens": _count(tokens)},
    }
    planner, best = _best_layout(value, wish, shape, vocab_size)
    comments = _fill_in(value, planner, best, tokens, continues=wish.model is not None)
    comments |= _still_to_do(sources, made_tokenizer, vocab_size) | {"train.max_tokens": length_note}
    cost, sure = cost_line(planner, best), certainty(planner, best)
    name = f"{wish.model}, continued" if wish.model else f"A new model of {format_count(parameters)} parameters"
    head = [
        f"{name}: {format_count(tokens)} tokens of {', '.join(wish.data)}.",
        f"Planned: {cost}.",
        f"How sure: {sure} (docs/planner.md).",
        "Made by `arriero recipes new`; `arriero train --dry-run` says more.",
    ]
    ranks = planner.machine.ranks
    _must_pass_a_dry_run(value, ranks)
    commands = _commands(sources, made_tokenizer, vocab_size, wish, out, ranks)
    return NewRecipe(commented_yaml(value, comments, head), cost, sure, commands)


def _fill_in(
    value: dict[str, Any], planner: Planner, best: Forecast, tokens: int, *, continues: bool
) -> dict[str, str]:
    """Put layout, batch, schedule and saving into the recipe; the comments that say why, by key."""
    seq_len = value["data"]["seq_len"]
    batch = best.layout.dp * best.layout.micro_batch * best.layout.accumulation
    steps = -(-tokens // (batch * seq_len))
    rate = next(rate for size, rate in _RATES if planner.parameters <= size)
    save_steps = max(min(round(_SAVE_EVERY_S / best.time.total), steps // 2), 1)
    keys = best.keys()
    value["train"] = {
        "global_batch_size": batch,
        "per_device_train_batch_size": best.layout.micro_batch,
        "activation_checkpointing": keys["activation_checkpointing"],
        "max_tokens": _count(tokens),
        "precision": planner.recipe.train.precision,
    }
    value["optim"] = {
        "learning_rate": float(f"{rate / 10:.2g}") if continues else rate,
        "warmup_steps": 0.02,
        "min_lr_ratio": 0.1,
    }
    unusual = {key: keys[key] for key in _LAYOUT_KEYS if keys[key] not in (1, "none")}
    value["parallel"] = {"zero_stage": keys["zero_stage"]} | unusual
    value["checkpoint"] = {"save_steps": save_steps}
    value["eval"] = {"eval_on_start": True, "eval_steps": save_steps, "max_rows": 1024}
    return {
        "train.global_batch_size": f"rows: {format_count(batch * seq_len)} tokens a step, {steps:,} steps",
        "train.per_device_train_batch_size": "what the planner found best",
        "optim.learning_rate": "a tenth of a new model's" if continues else "as published models of this size",
        "checkpoint.save_steps": "about every half hour, and twice at least",
    }


def shape_of_size(parameters: int, vocab_size: int) -> ModelShape:
    """A LLaMA of about so many parameters, embeddings included: the width whose usual number of layers comes nearest.

    Raises ``UserError`` where the embeddings alone are more than that.
    """
    found = []
    for hidden, usual in _LADDER:
        heads = hidden // (128 if hidden > 2048 else 64)
        multiple = 256 if hidden >= 1024 else 64
        shape = ModelShape(
            hidden_size=hidden,
            intermediate_size=-(-8 * hidden // 3 // multiple) * multiple,
            num_hidden_layers=1,
            num_attention_heads=heads,
            num_key_value_heads=max(size for size in divisors(heads) if size <= max(heads // 4, 1)),
            vocab_size=vocab_size,
            tie_word_embeddings=parameters < 2e9,
        )
        one = parameter_count(shape, vocab_size)
        layer = parameter_count(shape.model_copy(update={"num_hidden_layers": 2}), vocab_size) - one
        layers = max(round(1 + (parameters - one) / layer), 1)
        whole = shape.model_copy(update={"num_hidden_layers": layers})
        off = abs(parameter_count(whole, vocab_size) / parameters - 1)
        found.append((abs(math.log(layers / usual)) + 5 * off, off, whole))
    _, off, best = min(found, key=lambda entry: entry[0])
    if off > 0.25:
        raise UserError(
            f"a model of {format_count(parameters)} parameters with {vocab_size:,} tokens can't be made: the nearest has "
            f"{format_count(parameter_count(best, vocab_size))}",
            "Ask for a larger model, or a tokenizer with fewer tokens.",
        )
    return best


def _source(name: str) -> _Text:
    """What a ``--data`` is: a dataset, or text that is still to be prepared, of which the size gives the tokens."""
    path = Path(name)
    if is_dataset(path) or (dataset_exists(path) and not path.exists()):
        return _Text(name, None, open_dataset(path).splits["train"].tokens)
    files, _ = list_files([name], is_dataset=is_dataset)
    sizes = [file.path.stat().st_size for file in files if file.hub is None]
    # Two digits: it is an estimate.
    tokens = int(float(f"{sum(sizes) / _BYTES_PER_TOKEN:.2g}")) if len(sizes) == len(files) else None
    stem = files[0].name if files[0].hub is not None else path.name.strip("*").partition(".")[0] or "text"
    return _Text(f"work/{stem.replace('/', '-')}", name, tokens)


def _model(wish: Wish, sources: list[_Text]) -> tuple[dict[str, Any], ModelShape, int, bool]:
    """(the recipe's section, shape, rows of the embedding, whether a tokenizer is still to be trained)."""
    if wish.model is not None:
        shape, vocab_size = shape_of_model(Model(model_name_or_path=wish.model))
        return {"model_name_or_path": wish.model}, shape, vocab_size, False
    if wish.shape is None and wish.parameters is None:
        raise UserError(
            "which model? Neither --model nor --size nor --config is given",
            "For example --size 125M, or --model FOLDER to continue one.",
        )
    prepared = [source.path for source in sources if source.made_from is None]
    if wish.tokenizer is None and prepared:
        raise UserError(
            f"which tokenizer? {prepared[0]} was prepared with one, and a new model needs the same",
            "Give its folder: --tokenizer DIR.",
        )
    tokenizer = wish.tokenizer or "work/tokenizer"
    # A tokenizer that is named must be there; one of an earlier call of this command may be.
    there = len(load_tokenizer(tokenizer)) if wish.tokenizer or has_tokenizer(tokenizer) else 0
    given = wish.shape.vocab_size if wish.shape is not None else None
    vocab_size = given or there or next(count for size, count in _VOCABULARIES if (wish.parameters or 1e9) <= size)
    shape = wish.shape or shape_of_size(wish.parameters or 0, vocab_size)
    shape = shape.model_copy(update={"vocab_size": vocab_size})
    config = shape.model_dump(mode="json", exclude_defaults=True)
    return {"tokenizer": tokenizer, "config": config}, shape, vocab_size, there == 0


def _length(wish: Wish, parameters: int, known: int | None) -> tuple[int, str]:
    """(tokens of the run, why)."""
    if wish.tokens is not None:
        return wish.tokens, f"as asked, {wish.tokens / known:.2g} passes" if known else "as asked"
    if known is None:
        raise UserError("how many tokens? The size of a dataset on the hub isn't known here", "Give --tokens, e.g. 2B.")
    if wish.model is not None:
        return known, "one pass"
    most, wanted = _MOST_PASSES * known, _TOKENS_PER_PARAMETER * parameters
    if most < wanted:
        return most, f"{_MOST_PASSES} passes; {format_count(wanted)} would be {_TOKENS_PER_PARAMETER} a parameter"
    return wanted, f"{_TOKENS_PER_PARAMETER} a parameter, {wanted / known:.2g} passes"


def _best_layout(value: dict[str, Any], wish: Wish, shape: ModelShape, vocab_size: int) -> tuple[Planner, Forecast]:
    """The fastest layout with room to spare, by data parallelism alone where that is about as fast."""
    recipe = check_recipe(value, "the new recipe")
    model = Model(config=shape.model_copy(update={"vocab_size": vocab_size}), tokenizer="-")  # so that no hub is asked
    recipe = recipe.model_copy(update={"model": model})
    planner = plan(recipe, gpus=wish.gpus, gpu=wish.gpu)
    machine = planner.machine
    # Rows of a step that every rank has the same number of; without bf16 of its own a CPU is faster in fp32.
    ranks, asked = machine.ranks, recipe.train.global_batch_size
    fp32 = machine.device.is_cpu and machine.device.peak_flops <= machine.device.fp32_flops
    train = {"global_batch_size": -(-asked // ranks) * ranks, "precision": "fp32" if fp32 else "bf16"}
    planner = replace(planner, recipe=recipe.model_copy(update={"train": recipe.train.model_copy(update=train)}))
    found = planner.ranked()
    room = _FILL * machine.rank_device.memory_bytes
    fitting = [one for one in found if one.fits and one.memory.total <= room]
    if not fitting:
        least = min(found, key=lambda one: one.memory.total + one.memory.host)
        raise UserError(
            f"nothing fits: the smallest layout needs {cost_line(planner, least)}",
            "More or larger GPUs (--gpus, --gpu), or a smaller model (--size).",
        )
    fastest = min(one.time.total for one in fitting)
    plain = [one for one in fitting if one.layout.dp == ranks and one.time.total <= _SIMPLER * fastest]
    return planner, (plain or fitting)[0]


def _must_pass_a_dry_run(value: dict[str, Any], ranks: int) -> None:
    """``UserError`` for what only opening its inputs shows, such as a dataset of another tokenizer."""
    recipe = check_recipe(value, "the new recipe")
    if outline(recipe, ranks) is None:
        resolve(recipe, ranks, weights=False)


def _still_to_do(sources: list[_Text], made_tokenizer: bool, vocab_size: int) -> dict[str, str]:
    """Comments on what the recipe names and isn't there yet."""
    comments = {}
    raw = [source for source in sources if source.made_from is not None]
    if raw:
        comments["data.sources"] = f"still to be prepared: {', '.join(source.path for source in raw)}"
    if made_tokenizer:
        comments["model.tokenizer"] = f"still to be trained, with {vocab_size:,} tokens"
    return comments


def _commands(
    sources: list[_Text], made_tokenizer: bool, vocab_size: int, wish: Wish, out: Path, ranks: int
) -> tuple[str, ...]:
    """What is still to be done, in order."""
    by = wish.tokenizer or wish.model or "work/tokenizer"
    raw = [source for source in sources if source.made_from is not None]
    lines = []
    if made_tokenizer:
        texts = " ".join(f"{source.made_from}" for source in raw)
        lines.append(f"arriero tokenizer train {texts} --vocab-size {vocab_size} --out {by}")
    lines += [f"arriero prepare {source.made_from} --tokenizer {by} --out {source.path}" for source in raw]
    number = f" --nproc {ranks}" if wish.gpus else ""
    return (*lines, f"arriero train {out} --dry-run{number}", f"arriero train {out}{number}")


def _count(number: int) -> int | str:
    """``2.5B`` where that is exact."""
    short = format_count(number)
    return short if parse_count(short) == number else number
