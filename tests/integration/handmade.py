"""Checkpoints of models that nobody trained: as ``save_checkpoint`` writes them, on two ranks, without an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import torch
import yaml
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GenerationConfig

from arriero.checkpoint.layout import FORMAT_VERSION, MANIFEST, file_entry, manifest_hash
from arriero.describe import name_as_version_4
from arriero.run_folder import RunFolder


def handmade_run(path: Path, config: Any, tokenizer: Any, *, precision: str = "fp32", std: float = 0.2) -> Path:
    """A run folder with one checkpoint, whose path is returned; its weights are random and wide enough to differ."""
    torch.manual_seed(0)
    run = RunFolder(path)
    config.save_pretrained(run.model)
    tokenizer.save_pretrained(run.model)
    name_as_version_4(run.model / "tokenizer_config.json")
    ids = (config.bos_token_id, config.eos_token_id)
    GenerationConfig(bos_token_id=ids[0], eos_token_id=ids[1]).save_pretrained(run.model)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            mean = 1.0 if parameter.ndim == 1 else 0.0
            parameter.copy_(torch.randn_like(parameter) * std + mean)
    checkpoint = path / "checkpoint-3"
    checkpoint.mkdir(parents=True)
    halves: list[dict[str, torch.Tensor]] = [{}, {}]
    parameters: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        flat, middle = parameter.detach().flatten(), parameter.numel() // 3
        parameters[name] = {"shape": list(parameter.shape), "slices": []}
        for rank, (start, stop) in enumerate(((0, middle), (middle, flat.numel()))):
            halves[rank] |= {
                f"{name}/master": flat[start:stop].clone(),
                f"{name}/exp_avg": torch.randn(stop - start) * 1e-3,
                f"{name}/exp_avg_sq": torch.rand(stop - start) * 1e-6,
            }
            piece = {"file": f"state-{rank:05}.safetensors", "start": start, "stop": stop}
            parameters[name]["slices"].append(piece)
    for rank, tensors in enumerate(halves):
        save_file(tensors, checkpoint / f"state-{rank:05}.safetensors")
    input_ids = torch.randint(3, len(tokenizer), (1, 24))
    with torch.no_grad():
        model.to({"fp32": torch.float32, "bf16": torch.bfloat16}[precision])
        logits = model(input_ids=input_ids, use_cache=False).logits.float()
    save_file({"input_ids": input_ids, "logits": logits}, checkpoint / "probe.safetensors")
    _write_states(checkpoint, precision)
    files = {file.name: file_entry(file) for file in checkpoint.iterdir()}
    body = {"format_version": FORMAT_VERSION, "step": 3, "world_size": 2, "parameters": parameters, "files": files}
    (checkpoint / MANIFEST).write_bytes(orjson.dumps(body | {"xxh3": manifest_hash(body)}))
    return checkpoint


def _write_states(checkpoint: Path, precision: str) -> None:
    recipe = {
        "output_dir": "unused",
        "model": {"config": {"hidden_size": 64}, "tokenizer": "unused"},
        "data": {"sources": [{"path": "unused"}], "seq_len": 64},
        "train": {"global_batch_size": 2, "max_steps": 6, "precision": precision},
        "optim": {"learning_rate": 1e-3},
    }
    trainer = {
        "step": 3,
        "updates": 3,
        "steps": 6,
        "position": 6,
        "tokens": 384,
        "precision": precision,
        "evaluation": {"eval_loss": 2.5},
        "recipe": yaml.safe_dump(recipe),
        "sources": [{"name": "made", "epochs": 0.5}],
    }
    data = {"position": 6, "taken": {"made": 6}, "sources": [{"name": "made", "fingerprint": "0123"}]}
    (checkpoint / "trainer_state.json").write_bytes(orjson.dumps(trainer))
    (checkpoint / "data_state.json").write_bytes(orjson.dumps(data))
