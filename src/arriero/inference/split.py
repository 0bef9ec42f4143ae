"""A model split over the ranks of this machine by DeepSpeed's inference engine; the only file that calls it.

Each rank holds a part of every layer's matrices and of the head (AutoTP) and its own heads' keys and values. DeepSpeed's
kernels aren't put in: they keep keys and values in their own place, where rows could neither join nor leave.
"""

from __future__ import annotations

import warnings
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from arriero.errors import UserError
from arriero.inference.decode import Decoder
from arriero.inference.generate import load_model, load_tokenizer_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # DeepSpeed's own imports warn about torch's deprecations
    import deepspeed
# On a CPU DeepSpeed would compile this op when it starts, for half a minute; gloo does its work.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def load_split(folder: Path, ranks: int, device: torch.device) -> tuple[Decoder, Any, int]:
    """This rank's part of a folder's model, its tokenizer, and the bytes of the weights that the rank holds.

    Every rank calls it, and from then on runs the same rows: logits are rank 0's on all of them. ``UserError`` where the
    heads can't be shared evenly.
    """
    model = load_model(folder, "cpu")
    heads = getattr(model.config, "num_key_value_heads", None) or model.config.num_attention_heads
    if heads % ranks:
        raise UserError(
            f"{ranks} ranks can't share {heads} key and value heads evenly",
            f"Use --nproc {max(n for n in range(1, ranks) if heads % n == 0)}.",
        )
    deepspeed.init_distributed(
        deepspeed.accelerator.get_accelerator().communication_backend_name(), dist_init_required=False
    )
    with redirect_stdout(StringIO()):  # it prints what it splits
        engine = deepspeed.init_inference(
            model, tensor_parallel={"tp_size": ranks}, dtype=model.dtype, replace_with_kernel_inject=False
        )
    split = engine.module.to(device)
    decoder = Decoder(split, plain=f"{type(split).__name__} runs by Transformers' own forward, split by DeepSpeed")
    whole = decoder.forward

    def agreed(*arguments: Any) -> Tensor:
        # The ranks' sums may differ in the last bit, and their next tokens must not.
        logits = whole(*arguments).float().contiguous()
        deepspeed.comm.broadcast(logits, 0)
        return logits

    decoder.forward = agreed
    held = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in split.parameters()}
    return decoder, load_tokenizer_of(folder), sum(held.values())
