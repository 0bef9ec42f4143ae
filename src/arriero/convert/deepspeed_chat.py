"""A command line of DeepSpeed-Chat's first step (``deepspeed main.py …``), alone or in a shell script, into a recipe."""

from __future__ import annotations

import re
import shlex
from typing import Any

from arriero.config.keys import nearest
from arriero.convert.deepspeed_json import settle_deepspeed
from arriero.convert.draft import Draft, our_keys, whole
from arriero.convert.hugging_face import carry_source
from arriero.errors import UserError

# The script's own defaults, where arriero's differ.
_DEFAULTS: dict[str, Any] = {
    "data.seq_len": 512,
    "train.per_device_train_batch_size": 16,
    "train.num_train_epochs": 1,
    "train.seed": 1234,
    "optim.learning_rate": 1e-3,
    "optim.lr_scheduler_type": "cosine",
    "optim.warmup_steps": 0,
    "optim.min_lr_ratio": 0.0,
    "optim.weight_decay": 0.0,
    "parallel.zero_stage": 0,
}
_FLAGS = {
    *("gradient_checkpointing", "offload", "only_optimize_lora", "deepspeed", "compute_fp32_loss"),
    *("enable_tensorboard", "add_eot_token", "print_loss"),
}
_WHY = {
    "data_split": "its shares are for the three steps of RLHF; --validation-split of arriero prepare holds documents out",
    "data_output_path": "arriero prepare --out is that",
    "sft_only_data_path": "prepare it as a source of its own",
    "only_optimize_lora": "arriero trains all weights",
    "dropout": "model.config.attention_dropout, for a new model",
    "tensorboard_path": "always in the run folder",
    "compute_fp32_loss": "the loss is always computed in fp32",
    "add_eot_token": "every document ends with the tokenizer's EOS",
    "print_loss": "log.logging_steps says how often",
}
_SILENT = {"deepspeed", "local_rank", "print_loss", "enable_tensorboard"}
_ANOTHER_STEP = ("actor_model_name_or_path", "critic_model_name_or_path", "num_padding_at_beginning")


def convert_deepspeed_chat(text: str, *, gpus: int | None) -> Draft:
    """A draft of a command line. gpus: where it doesn't say it itself (``--num_gpus``, ``--num_nodes``, ``--include``).

    Raises ``UserError`` where there is no such command, it is another step's, or nothing says how many GPUs it ran on.
    """
    launcher, given = _read_command(text)
    found = [name for name in _ANOTHER_STEP if name in given]
    if found:
        raise UserError(
            f"--{found[0]} is an option of DeepSpeed-Chat's reward or RLHF step", "Only step 1 trains on text."
        )
    draft = Draft("DeepSpeed-Chat")
    if "model_name_or_path" not in given:
        raise UserError("the command has no --model_name_or_path", "DeepSpeed-Chat asks for one too.")
    draft.put("model.model_name_or_path", given.pop("model_name_or_path"), "--model_name_or_path")
    paths = given.pop("data_path", [])
    carry_source(draft, [_hub(name) for name in ([paths] if isinstance(paths, str) else paths)], None)
    _carry_precision(draft, given)
    if given.pop("offload", False):
        draft.put("parallel.offload_optimizer", "cpu", "--offload")
        if int(given.get("zero_stage", 0)) == 3:
            draft.put("parallel.offload_param", "cpu", "--offload")
    if int(given.get("lora_dim", 0)) > 0:
        lora = " ".join(f"{name} {given.pop(name)}" for name in list(given) if name.startswith("lora_"))
        draft.drop("--lora_dim", lora, "arriero trains all weights; needs far more memory: see arriero plan")
    accumulation = int(given.pop("gradient_accumulation_steps", 1))
    for name, key in our_keys("deepspeed-chat").items():
        if name in given:
            value = _number(given.pop(name)) if key not in ("output_dir",) else given.pop(name)
            draft.put(key, value, f"--{name}")
    for key, value in _DEFAULTS.items():
        draft.default(key, value)
    draft.values.setdefault("output_dir", "runs/converted")
    draft.said.setdefault(
        "data.isolate_documents", "a text a row, padded, there; here rows are packed with texts kept apart"
    )
    draft.values["data.isolate_documents"] = True
    draft.put("eval.eval_on_start", True, "main.py", "and at the end; there, after each epoch")
    draft.put("eval.eval_steps", None, "main.py")
    for name, value in given.items():
        if name not in _SILENT:
            near = nearest(name, our_keys("deepspeed-chat"))
            draft.drop(f"--{name}", value, _WHY.get(name) or (f"unknown there; {near}?" if near else "unknown there"))
    _carry_batch(draft, launcher, accumulation, gpus)
    return draft


def _carry_precision(draft: Draft, given: dict[str, Any]) -> None:
    precision = given.pop("dtype", None)
    draft.put(
        "train.precision", precision or "fp16", "--dtype", "" if precision else "what the script trains in by default"
    )
    if int(given.get("zero_stage", 0)) == 0:
        given.pop("zero_stage", None)
        draft.put("parallel.zero_stage", 1, "--zero_stage 0", "0 there; in 16 bits 1 is exact here and costs the same")


def _carry_batch(draft: Draft, launcher: dict[str, Any], accumulation: int, gpus: int | None) -> None:
    own = _gpus_of(launcher)
    if own is not None and gpus is not None and own != gpus:
        draft.clashes.append(f"GPUs: the command says {own}, --gpus says {gpus}")
    count = own or gpus
    if count is None:
        raise UserError(
            "on how many GPUs did it run? The command leaves that to the machine, and a step's rows depend on it",
            "Say it: --gpus N.",
        )
    micro = int(draft.values["train.per_device_train_batch_size"])
    words = f"{micro} a GPU × {accumulation} accumulated × {count} GPUs"
    draft.put("train.global_batch_size", micro * accumulation * count, words, words)
    draft.values["deepspeed"] = []
    settle_deepspeed(draft, micro_batch=micro, accumulation=accumulation, dp=count)


def _gpus_of(launcher: dict[str, Any]) -> int | None:
    """As far as the launcher's own options say it."""
    nodes, per_node = int(launcher.get("num_nodes", 1)), launcher.get("num_gpus")
    if per_node is not None:
        return nodes * int(per_node)
    include = launcher.get("include")
    if isinstance(include, str):  # host:0,1@other:2,3
        slots = [part.partition(":")[2] for part in include.split("@")]
        if all(slots):
            return sum(len(slot.split(",")) for slot in slots)
    return None


def _read_command(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(options of the launcher, options of the script) of the last such command, with the script's variables filled in."""
    joined = re.sub(r"\\\s*\n", " ", text)
    variables: dict[str, str] = {}
    command = None
    for line in joined.splitlines():
        stripped = line.strip()
        if assigned := re.fullmatch(r"(?:export\s+)?(\w+)=(?![$(])(\S*)", stripped):
            variables[assigned[1]] = assigned[2].strip("'\"")
        if not stripped.startswith("#") and re.search(r"\bmain\.py\b|--model_name_or_path", stripped):
            command = stripped
    if command is None:
        raise UserError(
            "there is no DeepSpeed-Chat command in it", "Something like: deepspeed main.py --model_name_or_path …"
        )
    filled = re.sub(r"\$\{?(\w+)\}?", lambda found: variables.get(found[1], found[0]), command)
    try:
        words = shlex.split(filled, comments=True)
    except ValueError as error:
        raise UserError(f"the command can't be read: {error}", "Check its quotes.") from None
    words = words[: next((n for n, word in enumerate(words) if re.match(r"[|;&]|\d*>|&>", word)), len(words))]
    place = next((n for n, word in enumerate(words) if word.endswith(".py")), 0)
    unfilled = sorted({word for word in words if "$" in word})
    if unfilled:
        raise UserError(f"nothing in it says what {', '.join(unfilled)} is", "Write the values into the command.")
    return _options(words[:place]), _options(words[place + 1 :])


def _options(words: list[str]) -> dict[str, Any]:
    """``--name value…`` pairs: a flag is True, several values are a list. The same option twice is a ``UserError``."""
    found: dict[str, Any] = {}
    name = None
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            if name in found:
                raise UserError(f"--{name} stands there twice", "Keep the one that is meant.")
            found[name] = value if equals else True
        elif name is not None and name not in _FLAGS:
            known = found[name]
            found[name] = word if known is True else [*(known if isinstance(known, list) else [known]), word]
    return found


def _hub(name: str) -> str:
    """A dataset of the hub is named as OWNER/NAME there; a path stays a path."""
    return f"hf://{name}" if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not name.startswith((".", "/")) else name


def _number(text: Any) -> Any:
    if isinstance(text, bool):
        return text
    try:
        return whole(float(text))
    except (TypeError, ValueError, OverflowError):
        return text
