"""A causal model of Transformers', new or from a folder, ready to be trained: no model code of our own.

Weights are set parameter by parameter, by name: a new model's values depend on the seed and the name alone, so they
are the same in every layout, and a folder's are read as slices of its safetensors files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from arriero.config.schema import Model
from arriero.errors import UserError
from arriero.model import attention
from arriero.model.layers import compile_layers, recompute_layers, use_liger
from arriero.model.loss import LossHead

# Gives access to a parameter's full value for writing; does nothing unless the parameter is split over ranks.
Gather = Callable[[nn.Parameter], AbstractContextManager[Any]]


class PretrainModel(nn.Module):
    """Rows in, summed loss out.

    ``forward(input_ids, targets, position_ids)``, each int64 ``[rows, seq_len]``, gives the summed loss, fp32 ``[]``,
    and each row's, fp32 ``[rows]``. Without targets it gives logits ``[rows, seq_len, V]``.

    No attention mask and no cache: Transformers then builds the block mask from restarting position ids. With a cache
    or an all-ones mask documents would leak into one another. Flash attention takes no mask: it gets the rows as one,
    and where each document begins.
    """

    causal_lm: Any  # a Transformers model; its attributes are known to Transformers alone

    def __init__(self, causal_lm: nn.Module) -> None:
        super().__init__()
        self.causal_lm = causal_lm

    def forward(
        self, input_ids: Tensor, targets: Tensor | None, position_ids: Tensor, attention_mask: Tensor | None = None
    ) -> Any:
        """attention_mask: ``[rows, 1, L, L]``, only where a rank has a part of each row and can't see where documents begin."""
        shape = input_ids.shape
        varlen: dict[str, Any] = {}
        if str(self.causal_lm.config._attn_implementation).startswith("flash_attention"):
            varlen = attention.varlen_arguments(position_ids)
            # Given several rows, Transformers' flash attention takes each for one document.
            input_ids, position_ids = input_ids.reshape(1, -1), position_ids.reshape(1, -1)
        hidden = self.causal_lm.model(
            input_ids=input_ids, position_ids=position_ids, attention_mask=attention_mask, use_cache=False, **varlen
        ).last_hidden_state.view(*shape, -1)
        if targets is None:
            return self.causal_lm.lm_head(hidden)
        loss, losses = self.causal_lm.lm_head(hidden, targets)
        return loss, losses.view(targets.shape).sum(1)

    def recompute_layers(self, every: int) -> None:
        """Recompute the activations of every n-th decoder layer in the backward pass."""
        recompute_layers(self.causal_lm, every)

    def compile_layers(self) -> None:
        """Compile the decoder layers and the loss when they are first called."""
        compile_layers(self.causal_lm)

    def use_liger(self) -> int:
        """Take Liger's kernels for norms and gated units; how many modules changed. ``ImportError`` without them."""
        return use_liger(self.causal_lm)

    def parameters_by_name(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under the names that the Hugging Face folder gives them, tied ones once."""
        named: Iterator[tuple[str, nn.Parameter]] = self.causal_lm.named_parameters()
        return named


def model_folder(name: str, *, weights: bool = True) -> Path:
    """The folder that ``model_name_or_path`` names; a name on the hub is downloaded into Hugging Face's cache, without
    ``weights`` only its small files.

    Raises ``UserError`` where there is neither.
    """
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = ["*.json", "tokenizer*", "*.jinja", *(["*.safetensors"] if weights else [])]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"model.model_name_or_path: there is no folder {name!r}, and the hub gave none either: "
            f"{str(error).splitlines()[0]}",
            "Give the path of a Hugging Face model folder, or a hub name while the hub can be reached.",
        ) from None


def has_weights(folder: Path) -> bool:
    """Whether tensors lie in a Hugging Face folder, in files that are read here."""
    return any(folder.glob("*.safetensors"))


def model_config(
    model: Model, folder: Path | None, *, vocab_size: int, seq_len: int, token_ids: dict[str, int | None]
) -> Any:
    """The Transformers configuration of the recipe's model.

    folder: that of a model to continue. token_ids: bos_token_id, eos_token_id and pad_token_id of the tokenizer.
    Raises ``UserError`` where the folder has no configuration, the type is unknown or doesn't read a given key, or the
    tokenizer has more tokens than the model has embeddings.
    """
    if folder is not None:
        config = _folder_config(folder)
    else:
        assert model.config is not None
        values = {key: value for key, value in model.config.model_dump().items() if value is not None}
        values = {"vocab_size": vocab_size, "max_position_embeddings": seq_len} | token_ids | values
        config = _new_config(values, model.config.model_fields_set)
    _refuse_other_heads(config)
    if vocab_size > config.vocab_size:
        raise UserError(
            f"the tokenizer has {vocab_size:,} tokens, the model only {config.vocab_size:,} embeddings",
            "Use the tokenizer that the model was trained with, or give a new model a vocab_size of at least that "
            "(or resize the folder with Transformers' resize_token_embeddings first).",
        )
    if seq_len > config.max_position_embeddings:
        raise UserError(
            f"data.seq_len {seq_len} is beyond the model's max_position_embeddings {config.max_position_embeddings}",
            "Use shorter rows, or raise max_position_embeddings with the rope_parameters that go with it.",
        )
    return config


def _new_config(values: dict[str, Any], given: set[str]) -> Any:
    """A configuration of ``values["model_type"]``; ``given``: keys of the recipe, which that type must know."""
    model_type = values.pop("model_type")
    try:
        known = AutoConfig.for_model(model_type)
    except ValueError as error:
        raise UserError(f"model.config.model_type: Transformers has no {model_type!r}", str(error)[:200]) from None
    unread = sorted(name for name in given - {"model_type"} if not hasattr(known, name))
    if unread:
        raise UserError(
            f"model.config: {model_type} models don't read {', '.join(unread)}",
            "Remove it, or choose another model_type.",
        )
    return AutoConfig.for_model(model_type, **{name: value for name, value in values.items() if hasattr(known, name)})


def parameter_total(config: Any) -> int:
    """Parameters of the configuration's model, tied ones once, without making any of them."""
    with torch.device("meta"), no_init_weights():
        model = _architecture(config)._from_config(config)
    model.tie_weights()
    return sum(parameter.numel() for parameter in model.parameters())


def _architecture(config: Any) -> Any:
    try:
        architecture = AutoModelForCausalLM._model_mapping[type(config)]
    except KeyError:
        raise UserError(f"Transformers has no causal language model of type {config.model_type!r}") from None
    if architecture.base_model_prefix != "model":
        raise UserError(
            f"{config.model_type} models are built otherwise than LLaMA's and can't be trained here",
            "Llama, Mistral, Qwen and their like work: a decoder called model and a head called lm_head.",
        )
    return architecture


def _folder_config(folder: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise UserError(
            f"model.model_name_or_path: {folder} has no configuration that Transformers reads",
            str(error).split("\n")[0],
        ) from None


def _refuse_other_heads(config: Any) -> None:
    """The loss is taken from hidden states by one projection; what scales or caps logits would be left out."""
    for name in ("logit_scale", "logits_scaling", "final_logit_softcapping"):
        value = getattr(config, name, None)
        if value not in (None, 1, 1.0):
            raise UserError(
                f"{config.model_type} models change their logits ({name} is {value}), which training here doesn't do",
                "Models whose logits are hidden states times the head work: Llama, Mistral, Qwen and their like.",
            )


def build_model(
    model: Model,
    config: Any,
    *,
    seed: int,
    placement: AbstractContextManager[Any],
    folder: Path | None = None,
    gather: Gather | None = None,
    keep_part: Callable[[Any], None] | None = None,
) -> PretrainModel:
    """Create the model under ``placement`` (ZeRO-3: split over ranks as it is created) and set its weights.

    folder: whose tensors are continued; None: a new model. keep_part: takes modules out of the model before it has any
    memory, where this rank holds only some of them. Raises ``UserError`` where a folder's tensors don't fit the model exactly.
    """
    gather = gather or (lambda parameter: nullcontext())
    # The class is imported before the placement begins: ZeRO-3's context patches every module made under it.
    architecture = _architecture(config)
    with no_init_weights(), placement if keep_part is None else torch.device("meta"):
        causal_lm = architecture._from_config(
            config, dtype=torch.float32, attn_implementation=attention.implementation(model, whole=keep_part is None)
        )
    causal_lm.tie_weights()
    causal_lm.config.use_cache = False
    names = {name for name, _ in causal_lm.named_parameters()}
    if keep_part is not None:
        keep_part(causal_lm)
        causal_lm.to_empty(device="cpu")
        if causal_lm.lm_head is not None and config.tie_word_embeddings:
            causal_lm.lm_head.weight = causal_lm.model.embed_tokens.weight
    _restore_rope(causal_lm)
    wrapped = PretrainModel(causal_lm)
    if folder is None:
        _fill(wrapped, lambda name, shape: initial_value(name, shape, seed, config.initializer_range), gather)
    else:
        _fill(wrapped, FolderWeights(folder, causal_lm, names).read, gather)
    if causal_lm.lm_head is not None:
        LossHead.install(causal_lm)
    return wrapped


def _fill(model: PretrainModel, value: Callable[[str, tuple[int, ...]], Tensor], gather: Gather) -> None:
    """One parameter at a time, so that a rank holds one whole tensor at most beside its own part of the model."""
    for name, parameter in model.parameters_by_name():
        with gather(parameter), torch.no_grad():
            parameter.copy_(value(name, tuple(parameter.shape)))


def initial_value(name: str, shape: tuple[int, ...], seed: int, deviation: float) -> Tensor:
    """A new parameter: norms 1, biases 0, matrices normal with the config's deviation, as Transformers has them."""
    if len(shape) == 1:
        return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    return torch.empty(shape).normal_(0.0, deviation, generator=generator)


def _restore_rope(causal_lm: nn.Module) -> None:
    """Compute the rotary tables again in fp32: under ZeRO-3 they were made inside a context that makes every new
    tensor bf16, and at position 4,096 a bf16 frequency is off by whole radians."""
    for module in causal_lm.modules():
        if "inv_freq" in module._buffers:
            exact = type(module)(config=module.config)
            for name, buffer in exact.named_buffers():
                setattr(module, name, buffer)


class FolderWeights:
    """The tensors of a Hugging Face folder, by name, read one at a time."""

    def __init__(self, folder: Path, causal_lm: Any, names: set[str]) -> None:
        """names: of all the model's parameters, on whichever ranks they are."""
        self._files = _tensor_files(folder)
        self._folder = folder
        tied = set(getattr(causal_lm, "_tied_weights_keys", None) or ())
        missing = sorted(names - self._files.keys())
        unexpected = sorted(
            name for name in self._files.keys() - names - tied if not name.endswith("rotary_emb.inv_freq")
        )
        if missing or unexpected:
            raise UserError(
                f"{folder}: its tensors don't fit the model: {len(missing)} missing {missing[:3]}, "
                f"{len(unexpected)} unexpected {unexpected[:3]}",
                "The weights must be complete: none is ever initialised anew when a model is continued.",
            )

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor ``name``; ``UserError`` if its shape isn't the model's."""
        with safe_open(self._folder / self._files[name], framework="pt") as file:
            value: Tensor = file.get_tensor(name)
        if tuple(value.shape) != shape:
            raise UserError(f"{self._folder}: {name} has the shape {tuple(value.shape)}, the model wants {shape}")
        return value


def _tensor_files(folder: Path) -> dict[str, str]:
    """Tensor name → file name, from the index or the single file."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    if (folder / "model.safetensors").is_file():
        with safe_open(folder / "model.safetensors", framework="pt") as file:
            return dict.fromkeys(file.keys(), "model.safetensors")
    raise UserError(
        f"{folder} holds no model.safetensors",
        "Save the model with Transformers' save_pretrained (safetensors); pickled weights are not read.",
    )
