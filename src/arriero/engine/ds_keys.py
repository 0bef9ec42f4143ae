"""Raw DeepSpeed JSON held against DeepSpeed's own configuration: which keys it has, and which values it takes."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, get_args

from arriero.config.keys import nearest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # DeepSpeed's own imports warn about torch's deprecations
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
    from deepspeed.runtime import config as ds
    from deepspeed.runtime import constants
    from deepspeed.runtime.activation_checkpointing.config import ACT_CHKPT_DEFAULT
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

# Sections with a model of their own.
_MODELS: dict[str, type[DeepSpeedConfigModel]] = {
    "zero_optimization": DeepSpeedZeroConfig,
    "bf16": DeepSpeedBF16Config,
    "fp16": DeepSpeedFP16Config,
    "comms_logger": CommsLoggerConfig,
    "compile": CompileConfig,
    "timers.throughput": DeepSpeedThroughputTimerConfig,
}
# Sections that DeepSpeed reads as plain dictionaries, and by its own words the keys that it reads there.
_PLAIN: dict[str, frozenset[str]] = {
    "activation_checkpointing": frozenset(ACT_CHKPT_DEFAULT),
    "aio": frozenset(AIO_DEFAULT_DICT),
    "flops_profiler": frozenset(vars(DeepSpeedFlopsProfilerConfig({}))),
    "data_types": frozenset(
        (constants.GRAD_ACCUM_DTYPE, constants.PARAM_DTYPE, constants.BUFFER_DTYPE, constants.KEEP_IN_FP32_MODULES)
    ),
    "torch_autocast": frozenset(
        (
            constants.TORCH_AUTOCAST_ENABLED,
            constants.TORCH_AUTOCAST_DTYPE,
            constants.TORCH_AUTOCAST_LOWER_PRECISION_SAFE_MODULES,
        )
    ),
    "timers": frozenset(("throughput",)),
}
# What DeepSpeed reads of single values, each by the function that refuses a wrong one.
_VALUES: dict[str, Callable[[dict[str, Any]], Any]] = {
    constants.COMMUNICATION_DATA_TYPE: ds.get_communication_data_type,
}
_BOOLEANS = (
    constants.DUMP_STATE,
    constants.MEMORY_BREAKDOWN,
    constants.PRESCALE_GRADIENTS,
    constants.WALL_CLOCK_BREAKDOWN,
    constants.ZERO_ALLOW_UNTESTED_OPTIMIZER,
    constants.ZERO_FORCE_DS_CPU_OPTIMIZER,
)
_NUMBERS = (constants.GRADIENT_PREDIVIDE_FACTOR, constants.STEPS_PER_PRINT)


def unknown_key(path: str) -> str | None:
    """Why DeepSpeed reads nothing at a dotted path of a section that it has, or None where it does."""
    top, *rest = path.split(".")
    removed: dict[str, str] = ds._REMOVED_TOP_LEVEL_CONFIG_KEYS
    if top in removed:
        return removed[top]
    if top == "zero_optimization" and rest and rest[0] in ds._REMOVED_ZERO_CONFIG_KEYS:
        message: str = ds._REMOVED_ZERO_CONFIG_KEYS[rest[0]]
        return message
    section: Any = _MODELS.get(top) or _PLAIN.get(top)
    walked = top
    for key in rest:
        if section is None:
            return None
        known = _keys_of(section)
        if key not in known:
            guess = nearest(key, known)
            return f"{walked} has no key {key!r} in DeepSpeed" + (f"; is {guess} meant?" if guess else "")
        walked = f"{walked}.{key}"
        section = _MODELS.get(walked) or _PLAIN.get(walked) or (known[key] if isinstance(known, dict) else None)
    return None


def wrong_values(compiled: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(path, reason) of every value of a whole dictionary that DeepSpeed's own models refuse."""
    level, logger = ds.logger.level, ds.logger
    logger.setLevel(logging.ERROR)  # it warns of deprecated keys, once per process, wherever it is built first
    try:
        for path, model in _MODELS.items():
            section = _at(compiled, path)
            if isinstance(section, Mapping):
                yield from ((f"{path}.{where}".rstrip("."), why) for where, why in _refused(model, section))
    finally:
        logger.setLevel(level)
    for key, read in _VALUES.items():
        try:
            read(dict(compiled))
        except (ValueError, AttributeError) as error:
            yield key, str(error)
    for key in _BOOLEANS:
        if not isinstance(compiled.get(key, False), bool):
            yield key, f"expected true or false, got {compiled[key]!r}"
    for key in _NUMBERS:
        if isinstance(compiled.get(key, 0), bool) or not isinstance(compiled.get(key, 0), int | float):
            yield key, f"expected a number, got {compiled[key]!r}"


def _refused(model: type[DeepSpeedConfigModel], section: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    try:
        model(**section)
    except AssertionError as error:  # raised past pydantic by the deprecated keys
        yield "", str(error)
    except ValueError as error:
        errors = getattr(error, "errors", None)
        if errors is None:
            yield "", str(error)
            return
        for one in errors():
            yield ".".join(str(part) for part in one["loc"]), f"{one['msg']}, got {one['input']!r}"


def _keys_of(section: Any) -> dict[str, Any] | frozenset[str]:
    """Keys of a section; of a model with the model that stands below each."""
    if isinstance(section, frozenset):
        return section
    known: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        inner = next(_models_in((field.annotation,)), None)
        known |= dict.fromkeys((field.alias or name, name), inner)
    return known


def _models_in(annotations: Iterable[Any]) -> Iterator[type[DeepSpeedConfigModel]]:
    for annotation in annotations:
        if isinstance(annotation, type) and issubclass(annotation, DeepSpeedConfigModel):
            yield annotation
        else:
            yield from _models_in(get_args(annotation))


def _at(value: Any, path: str) -> Any:
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
