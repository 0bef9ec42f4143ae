"""What was exported, loaded again in a process of its own: its logits beside those of the training engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from arriero.checkpoint.hf_folder import DTYPES
from arriero.checkpoint.universal import universal_weights
from arriero.errors import UserError


def compare_with_engine(folder: Path, checkpoint: Path, precision: str, model: Path) -> tuple[float, float]:
    """Largest difference between the export's logits and the training engine's, and the largest logit.

    A new process does it, so that nothing of the one that wrote can stand in for what is missing in the files.
    model: folder with the run's configuration. Raises ``UserError`` where the export doesn't load cleanly.
    """
    command = [sys.executable, "-m", "arriero.checkpoint.reload", str(folder), str(checkpoint), precision, str(model)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise UserError(f"what was exported doesn't load again: {last}", exit_code=1)
    difference, largest = json.loads(done.stdout.splitlines()[-1])
    return difference, largest


def _load(folder: Path, precision: torch.dtype, model: Path) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig

    if (weights := universal_weights(folder)) is not None:
        loaded = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=precision)
        loaded.load_state_dict(weights | {name: weights[of] for name, of in _tied(loaded).items()}, strict=True)
        return loaded
    options: dict[str, Any] = {"dtype": precision, "output_loading_info": True}
    if files := [path.name for path in folder.glob("*.gguf")]:
        # Transformers' own reader, but with the run's configuration: it doesn't read rotary scaling from GGUF, and
        # knows Mistral under LLaMA's name only.
        options |= {"gguf_file": files[0], "quantization_config": GgufConfig(dequantize=True)}
        values = AutoConfig.from_pretrained(model).to_dict()
        kind = values.pop("model_type")
        options["config"] = AutoConfig.for_model("llama" if kind == "mistral" else kind, **values)
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, **options)
    wrong = {key: sorted(info[key]) for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[key]}
    if wrong:
        raise ValueError(f"its tensors are not the model's: {wrong}")
    return loaded


def _tied(model: Any) -> dict[str, str]:
    """Names of tied parameters → the name under which the shared tensor is saved."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = dict(model.named_parameters(remove_duplicate=False))
    return {name: first[id(parameter)] for name, parameter in every.items() if first[id(parameter)] != name}


def main() -> None:
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    folder, checkpoint, precision, model = sys.argv[1:]
    probe = load_file(Path(checkpoint) / "probe.safetensors")
    # Not float32 and then .to(bf16): that would round the rotary tables too.
    loaded = _load(Path(folder), DTYPES[precision], Path(model)).eval()
    with torch.no_grad():
        logits = loaded(input_ids=probe["input_ids"], use_cache=False).logits.float()
    print(json.dumps([float((logits - probe["logits"]).abs().max()), float(probe["logits"].abs().max())]))


if __name__ == "__main__":
    main()
