"""Somebody else's training script: DeepSpeed and Transformers, nothing of arriero. Not a test file itself.

torchrun --nproc-per-node N tests/integration/universal_script.py CHECKPOINT CONFIG_FOLDER PROBE.safetensors OUT

Loads the universal checkpoint at ZeRO stages 1, 2 and 3, writes what it then holds, and makes one update.
"""

import json
import os
import sys
from pathlib import Path

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

checkpoint, config_folder, probe, out = sys.argv[1:]
# On a CPU DeepSpeed would compile an operation of its own for all-reduce first: a minute, for nothing here.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo")
rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
input_ids = load_file(probe)["input_ids"]
report = {}
for stage in (1, 2, 3):
    torch.manual_seed(stage)  # other weights than the checkpoint's
    config = AutoConfig.from_pretrained(config_folder)
    config.use_cache = False
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "checkpoint": {"load_universal": True},
        "zero_allow_untested_optimizer": True,
    }
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=123.0, betas=(0.9, 0.95), eps=1e-8, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    path, client = engine.load_checkpoint(checkpoint)
    if stage == 3:
        # Stage 3 gives all its groups one and the same counter, and each group's update would count it up.
        for state in engine.optimizer.optimizer.state.values():
            state["step"] = state["step"].clone()
    held = {}
    for name, parameter in engine.module.named_parameters():
        held[f"{name}/master"] = safe_get_full_fp32_param(parameter).clone()
        for kind in ("exp_avg", "exp_avg_sq"):
            held[f"{name}/{kind}"] = safe_get_full_optimizer_state(parameter, kind).clone()
    losses = []
    for _ in range(2):
        loss = engine(input_ids=input_ids, labels=input_ids).loss
        losses.append(loss.item())
        engine.backward(loss)
        rates = sorted({group["lr"] for group in engine.optimizer.optimizer.param_groups})
        engine.step()
    steps = sorted({float(state["step"]) for state in engine.optimizer.optimizer.state.values()})
    report[stage] = {
        "losses": losses,
        "rates": rates,
        "adam_steps": steps,
        "global_steps": engine.global_steps,
        "step_in_client_state": client["arriero"]["step"],
    }
    if rank == 0:
        save_file({name: tensor.contiguous() for name, tensor in held.items()}, f"{out}/stage-{stage}.safetensors")
    engine.destroy()
if rank == 0:
    Path(out, "report.json").write_text(json.dumps(report), encoding="utf-8")
torch.distributed.barrier()
torch.distributed.destroy_process_group()
os._exit(0)  # all is written; gloo's threads abort a rank now and then while Python takes itself apart (torch 2.13)
