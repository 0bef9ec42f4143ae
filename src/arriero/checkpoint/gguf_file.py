"""A checkpoint as one GGUF file, for llama.cpp and what is built on it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from arriero.checkpoint.gguf_vocabulary import read_vocabulary, write_vocabulary
from arriero.checkpoint.hf_folder import cast
from arriero.checkpoint.saved import SavedState
from arriero.errors import UserError

# Transformers' model type → llama.cpp's architecture. Mistral without a sliding window is computed as LLaMA is.
_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_NAMES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
_ROTARY = "rope_freqs.weight"


def write_gguf(saved: SavedState, model: Path, folder: Path, *, dtype: str, name: str) -> str:
    """Write ``folder/<name>-<F32|F16|BF16>.gguf``; returns the file's name.

    model: the run's configuration and tokenizer. dtype: of the matrices; vectors (norms, biases) are always F32, as
    llama.cpp wants them. Raises ``UserError`` where the ``gguf`` package is missing, and where the architecture or the
    tokenizer has no form there that computes the same.
    """
    from transformers import AutoConfig

    try:
        import gguf
    except ImportError:
        raise UserError("--format gguf needs the gguf package", 'pip install "arriero[export]"') from None
    config = AutoConfig.from_pretrained(model)
    _check_architecture(config)
    vocabulary = read_vocabulary(model, config.vocab_size)
    architecture = _ARCHITECTURES[config.model_type]
    names = _tensor_names(gguf, architecture, saved, config.num_hidden_layers)
    file = f"{name}-{_NAMES[dtype]}.gguf"
    writer = gguf.GGUFWriter(folder / file, architecture)
    _write_hyperparameters(gguf, writer, config, name, dtype)
    write_vocabulary(writer, vocabulary)
    frequencies = rotary_factors(config)
    if frequencies is not None:
        writer.add_tensor_info(_ROTARY, frequencies.shape, frequencies.numpy().dtype, frequencies.nbytes)
    for source, target in names.items():
        shape = saved.parameters[source]["shape"]
        kind = dtype if len(shape) > 1 else "fp32"
        item = torch.empty(0, dtype=torch.float32 if kind == "fp32" else torch.float16).numpy()
        size = torch.Size(shape).numel() * item.itemsize
        writer.add_tensor_info(target, shape, item.dtype, size, raw_dtype=gguf.GGMLQuantizationType[_NAMES[kind]])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    # One tensor in memory at a time, in the order in which they were announced.
    if frequencies is not None:
        writer.write_tensor_data(frequencies.numpy())
    for source, target in names.items():
        value = saved.read(source)
        if architecture == "llama" and re.search(r"attn_[qk]\.", target):
            heads = config.num_attention_heads if "attn_q." in target else config.num_key_value_heads
            value = interleave_rotary(value, heads)
        value = cast(source, value, dtype if value.ndim > 1 else "fp32")
        # NumPy has no bf16; the writer only wants the bytes.
        writer.write_tensor_data((value.view(torch.int16) if value.dtype == torch.bfloat16 else value).numpy())
    writer.close()
    return file


def interleave_rotary(weight: Tensor, heads: int) -> Tensor:
    """Rows of a query or key projection, ``[heads · d, …]``, in the order of llama.cpp's rotation.

    Transformers rotates dimension i of a head with i + d/2, llama.cpp's ``llama`` 2i with 2i + 1 (as the LLaMA paper's
    code does).
    """
    # [h, 2, d/2, …] → [h, d/2, 2, …]
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, 2, half, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def rotary_factors(config: Any) -> Tensor | None:
    """What llama.cpp divides each rotary frequency by, fp32 ``[d/2]``, where Llama 3.1's scaling asks for it."""
    if config.rope_parameters["rope_type"] != "llama3":
        return None
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    exponents = torch.arange(0, _head_dim(config), 2, dtype=torch.float32) / _head_dim(config)
    plain: Tensor = 1.0 / config.rope_parameters["rope_theta"] ** exponents
    factors: Tensor = plain / scaled
    return factors


def _check_architecture(config: Any) -> None:
    """``UserError`` unless llama.cpp computes this model as Transformers does."""
    kind = config.model_type
    if kind not in _ARCHITECTURES:
        raise UserError(
            f"--format gguf: {kind} models aren't mapped to llama.cpp here",
            f"{', '.join(_ARCHITECTURES)} are. Export with --format hf, which llama.cpp's own converter reads.",
        )
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    rope = config.rope_parameters
    problems = {
        f"its activation is {config.hidden_act}, not silu": config.hidden_act != "silu",
        f"it attends to {window} tokens at most (sliding_window)": bool(window)
        and window < config.max_position_embeddings,
        f"its rotary scaling is {rope.get('rope_type')}": rope.get("rope_type") not in ("default", "linear", "llama3"),
        "it rotates a part of each head only": rope.get("partial_rotary_factor", 1.0) != 1.0,
    }
    if reasons := [reason for reason, holds in problems.items() if holds]:
        raise UserError(
            f"--format gguf: this {kind} model has no GGUF form that computes the same: {'; '.join(reasons)}",
            "Export with --format hf.",
        )


def _tensor_names(gguf: Any, architecture: str, saved: SavedState, layers: int) -> dict[str, str]:
    """Our names → GGUF's, in our order."""
    keys = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}
    known = gguf.get_tensor_name_map(keys[architecture], layers)
    names = {name: known.get_name(name, try_suffixes=(".weight", ".bias")) for name in saved.parameters}
    if unknown := [name for name, target in names.items() if target is None]:
        raise UserError(
            f"--format gguf: llama.cpp's {architecture} has no place for {', '.join(unknown[:3])}",
            "Export with --format hf.",
        )
    return names


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _write_hyperparameters(gguf: Any, writer: Any, config: Any, name: str, dtype: str) -> None:
    files = {"fp32": "ALL_F32", "fp16": "MOSTLY_F16", "bf16": "MOSTLY_BF16"}
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType[files[dtype]])
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(_head_dim(config))
    writer.add_value_length(_head_dim(config))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(_head_dim(config))
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if config.rope_parameters["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
