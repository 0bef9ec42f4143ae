"""What the ranks of a run must see alike, compared before anything starts: recipe, run folder, data and model.

Ranks on several hosts read their own copies of files. A rank that sees another recipe, an empty run folder or an older
dataset trains something else, or hangs the others; so each difference is said by name, with the host that has it.
"""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import orjson
import xxhash

from arriero.config.load import differing_keys
from arriero.config.schema import Recipe
from arriero.data.tokenizer import tokenizer_fingerprint
from arriero.engine.ds_config import read_deepspeed_json
from arriero.engine.parallel import World
from arriero.errors import UserError
from arriero.resolve import Inputs

T = TypeVar("T")

# A network file system may show a new file to other hosts this much later.
_PATIENCE_S = 10.0
_LOOK_AGAIN_S = 0.1
_MOST_SHOWN = 8


def check_view(world: World, recipe: Recipe, folder: Path) -> None:
    """``UserError`` on every rank where one has another recipe than rank 0, or another disk under the run folder."""
    mine = recipe.model_dump(mode="json")
    changes = differing_keys(world.from_first(mine), mine)
    _compare(
        world,
        "; ".join(f"{path} is {theirs!r} for rank 0 and {ours!r} here" for path, theirs, ours in changes),
        "the ranks have different recipes",
        "Start every host with the same command and the same recipe file.",
    )
    mark = folder / world.from_first(f".seen-{uuid.uuid4().hex}")
    if world.rank == 0:
        mark.touch()
    world.barrier()
    unseen = "" if _appears(mark) else f"{folder.absolute()} isn't the folder that rank 0 writes to"
    try:
        _compare(
            world,
            unseen,
            "output_dir must be one folder for all ranks, since each writes its part of a checkpoint there",
            "Put it on a disk that all hosts share, such as NFS or Lustre, and start in the same folder everywhere. "
            "Datasets, tokenizer and model may be copies on each host's own disk.",
        )
    finally:
        if world.rank == 0:
            mark.unlink(missing_ok=True)


def check_inputs(world: World, inputs: Inputs) -> None:
    """``UserError`` on every rank where one has opened another dataset, tokenizer or model than rank 0."""
    mine = _contents(inputs)
    first = world.from_first(mine)
    _compare(
        world,
        "; ".join(
            f"{name} is {first.get(name)} for rank 0 and {mine.get(name)} here"
            for name in sorted({*first, *mine})
            if first.get(name) != mine.get(name)
        ),
        "the ranks see different data",
        "Copy the same files to every host, or let all hosts read them from a disk that they share.",
    )


def on_all(world: World, work: Callable[[], T]) -> T:
    """Do the same on every rank; where one can't, ``UserError`` on all of them that says on which and why.

    Without it the ranks that can go on wait for those that can't, and say only that a connection was closed.
    """
    problem: UserError | None = None
    try:
        value = work()
    except UserError as error:
        problem = error
    alike = len(set(world.gather(str(problem)))) == 1
    if alike and problem is not None:
        raise problem
    if not alike:
        _compare(
            world,
            problem.problem if problem else "",
            "some ranks can't start",
            "They see other files than the rest: copy them to every host, or put them on a disk that all share.",
        )
    return value


def _compare(world: World, problem: str, title: str, remedy: str) -> None:
    """``UserError`` on every rank that lists what each has to say; nothing where none has a problem."""
    said = world.gather((socket.gethostname(), problem))
    lines = [f"  rank {rank} on {host}: {text}" for rank, (host, text) in enumerate(said) if text]
    if lines:
        more = [f"  and {len(lines) - _MOST_SHOWN} ranks more"] if len(lines) > _MOST_SHOWN else []
        raise UserError("\n".join([f"{title}:", *lines[:_MOST_SHOWN], *more]), remedy)


def _appears(path: Path) -> bool:
    until = time.monotonic() + _PATIENCE_S
    while not path.exists():
        if time.monotonic() > until:
            return False
        time.sleep(_LOOK_AGAIN_S)
    return True


def _contents(inputs: Inputs) -> dict[str, str]:
    """A short word for the content of everything that a rank opens for itself."""
    config = orjson.dumps(inputs.config.to_dict(), default=str, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    found = {f"the dataset {source.name}": source.dataset.fingerprint for source in inputs.sources}
    found["the tokenizer"] = tokenizer_fingerprint(inputs.tokenizer)
    found["the model's configuration"] = xxhash.xxh3_64_hexdigest(config)
    raw, origin = read_deepspeed_json(inputs.recipe.deepspeed)
    found[f"DeepSpeed's JSON ({origin})"] = xxhash.xxh3_64_hexdigest(orjson.dumps(raw, option=orjson.OPT_SORT_KEYS))
    for path in sorted(inputs.folder.glob("*.safetensors")) if inputs.folder is not None else ():
        found[f"the model's {path.name}"] = f"{path.stat().st_size} bytes"
    return found
