"""From a checkpoint to a model that others read, without a GPU and without DeepSpeed, and proof that it is the same one."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from math import prod
from pathlib import Path

from arriero.checkpoint.gguf_file import write_gguf
from arriero.checkpoint.hf_folder import DTYPES, write_hf_folder
from arriero.checkpoint.model_card import MARK, model_card
from arriero.checkpoint.reload import compare_with_engine
from arriero.checkpoint.saved import SavedState, read_json
from arriero.checkpoint.universal import write_universal
from arriero.disk import sync_folder
from arriero.errors import UserError
from arriero.run_folder import RunFolder
from arriero.units import parse_bytes

FORMATS = ("hf", "gguf", "universal")
# Largest difference of a logit, relative to the largest logit. In fp32 the reload differs by the order of sums only
# (1e-6 seen). In bf16 one unit in the last place is 2⁻⁸ = 4e-3, and training's attention in blocks rounds otherwise than
# the reload's fused one: 2.6e-2 seen over the 30 layers of SmolLM2-135M.
_TOLERANCE = {"fp32": 1e-4, "fp16": 4e-3, "bf16": 4e-2}


@dataclass(frozen=True)
class Export:
    """What was written."""

    path: Path
    parameters: int
    max_logit_difference: float
    files: list[str]


def export_checkpoint(
    checkpoint: Path,
    run: RunFolder,
    out: Path,
    *,
    form: str = "hf",
    dtype: str | None = None,
    max_shard_size: str | None = None,
) -> Export:
    """Write the model of ``checkpoint`` to the folder ``out``, with a model card.

    form: ``hf``, a Hugging Face folder; ``gguf``, one file for llama.cpp; ``universal``, masters and moments in
    DeepSpeed's universal layout, always fp32. dtype: bf16, fp16 or fp32 (from the
    masters); None: the precision that the model was trained in. max_shard_size: of a file of weights in a Hugging Face
    folder, such as ``5GB`` (the default).
    What was written is loaded again in a process of its own and its logits are compared with those that the training
    engine gave when it wrote the checkpoint; where they differ nothing is left at ``out`` and ``UserError`` says by
    how much. An ``out`` that holds anything but an export is refused.
    """
    trainer = read_json(checkpoint, "trainer_state.json")
    precision: str = trainer["precision"]
    dtype = dtype or ("fp32" if form == "universal" else precision)
    shard_bytes = _checked(form, dtype, max_shard_size)
    _refuse_foreign_folder(out)
    aside = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        with SavedState(checkpoint) as saved:
            parameters = sum(prod(entry["shape"]) for entry in saved.parameters.values())
            if form == "hf":
                shutil.copytree(run.model, aside)
                write_hf_folder(saved, aside, dtype=dtype, shard_bytes=shard_bytes)
            elif form == "gguf":
                aside.mkdir(parents=True)
                write_gguf(saved, run.model, aside, dtype=dtype, name=out.name)
            else:
                aside.mkdir(parents=True)
                write_universal(saved, aside)
        card = model_card(checkpoint, parameters=parameters, dtype=dtype, form=form)
        (aside / "README.md").write_text(card, encoding="utf-8")
        difference = _proven(aside, out, checkpoint, run, precision, dtype)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    if out.exists():
        shutil.rmtree(out)
    aside.rename(out)
    sync_folder(out.parent)
    return Export(out, parameters, difference, sorted(path.name for path in out.iterdir()))


def _checked(form: str, dtype: str, max_shard_size: str | None) -> int:
    """Bytes of a file of weights; ``UserError`` for options that are unknown or don't go together."""
    if form not in FORMATS:
        raise UserError(f"--format {form}: expected one of {', '.join(FORMATS)}")
    if dtype not in DTYPES:
        raise UserError(f"--dtype {dtype}: expected one of {', '.join(DTYPES)}")
    if form == "universal" and dtype != "fp32":
        raise UserError(f"--dtype {dtype}: --format universal holds the masters as they are, in fp32")
    if max_shard_size is not None and form != "hf":
        raise UserError(f"--max-shard-size is for --format hf, and this is {form}")
    try:
        return parse_bytes(max_shard_size or "5GB")
    except ValueError as error:
        raise UserError(f"--max-shard-size: {error}") from None


def _refuse_foreign_folder(out: Path) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    card = out / "README.md"
    if not card.is_file() or MARK not in card.read_text(encoding="utf-8", errors="replace"):
        raise UserError(f"{out} exists and is nothing that arriero exported", "Give another --out.")


def _proven(aside: Path, out: Path, checkpoint: Path, run: RunFolder, precision: str, dtype: str) -> float:
    """The largest difference of a logit; ``UserError`` where it is more than the precisions explain."""
    difference, largest = compare_with_engine(aside, checkpoint, precision, run.model)
    if not difference <= max(_TOLERANCE[precision], _TOLERANCE[dtype]) * largest:
        raise UserError(
            f"the exported model's logits differ from the trained one's by {difference:.3g} (largest logit "
            f"{largest:.3g}); nothing was written to {out}",
            "This is a fault of arriero's: please report it with the recipe.",
            exit_code=1,
        )
    return difference
