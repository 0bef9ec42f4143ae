"""Datasets on the Hugging Face hub, streamed by ``datasets``: ``hf://OWNER/NAME[/CONFIG][@REVISION][:SPLIT]``.

A folder of data files on this machine, ``hf://./FOLDER[:SPLIT]`` or ``hf:///FOLDER[:SPLIT]``, goes the same way.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from arriero.disk import hash_file
from arriero.errors import UserError

PREFIX = "hf://"
_ON_HUB = re.compile(
    r"(?:datasets/)?(?P<path>[\w.-]+/[\w.-]+)(?:/(?P<config>[^@:]+))?(?:@(?P<revision>[^:]+))?(?::(?P<split>\w+))?"
)
_ON_DISK = re.compile(r"(?P<path>\.{0,2}/.*?)(?::(?P<split>\w+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


class Unreachable(UserError):
    """The hub doesn't answer, now or in the middle: no fault of the data's, and the same command can go on later."""


@dataclass(frozen=True)
class HubDataset:
    """One split of a dataset. ``path`` is OWNER/NAME or a folder; ``revision`` a branch, a tag or, resolved, the commit;
    of a folder, resolved, the hash of its files."""

    path: str
    config: str | None = None
    revision: str | None = None
    split: str = "train"

    @property
    def name(self) -> str:
        """How it is written, without the revision."""
        return f"{PREFIX}{self.path}{f'/{self.config}' if self.config else ''}:{self.split}"

    @property
    def is_folder(self) -> bool:
        return self.path.startswith((".", "/"))


def parse_hub(source: str) -> HubDataset:
    """A source that begins with ``hf://``; the split is ``train`` where none is named."""
    text = source.removeprefix(PREFIX)
    found = (_ON_DISK if text.startswith((".", "/")) else _ON_HUB).fullmatch(text)
    if found is None:
        raise UserError(
            f"{source} names no dataset on the hub",
            "Write hf://OWNER/NAME[/CONFIG][@REVISION][:SPLIT], such as hf://HuggingFaceFW/fineweb/sample-10BT:train.",
        )
    return HubDataset(**{name: value for name, value in found.groupdict().items() if value is not None})


def resolve(hub: HubDataset) -> HubDataset:
    """The same with its revision fixed: the commit that a branch or tag (or none) stands for now. A commit needs no
    network. Raises ``Unreachable`` where the hub doesn't answer, ``UserError`` where it knows no such dataset."""
    if hub.is_folder:
        return replace(hub, revision=_content_hash(hub))
    if hub.revision is not None and _COMMIT.fullmatch(hub.revision):
        return hub
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        commit = HfApi().dataset_info(hub.path, revision=hub.revision).sha
    except (OSError, _http_error()) as error:
        if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403, 404):
            raise UserError(
                f"{hub.name}: {_first_line(error)}", "Check its name and revision, and `hf auth login` if it is gated."
            ) from error
        raise _unreachable(
            hub, error, "A full commit after @ needs no network where the dataset is prepared."
        ) from error
    assert commit is not None
    return replace(hub, revision=commit)


def stream_rows(hub: HubDataset, column: str, *, after: int = 0) -> Iterator[dict[str, Any]]:
    """The rows behind the first ``after``, with only the column where all have it. Raises ``Unreachable`` when the hub
    stops answering and ``UserError`` for a config or split that isn't there."""
    datasets = _import_datasets(hub)
    revision = None if hub.is_folder else hub.revision
    try:
        rows = datasets.load_dataset(hub.path, hub.config, split=hub.split, revision=revision, streaming=True)
        if rows.column_names is not None and column in rows.column_names:
            rows = rows.select_columns([column])
        yield from rows.skip(after) if after else rows
    except (datasets.exceptions.DatasetNotFoundError, FileNotFoundError, ValueError) as error:
        raise UserError(f"{hub.name}: {_first_line(error)}", "Check the dataset, its config and its split.") from error
    except (OSError, _http_error()) as error:
        raise _unreachable(hub, error, "The same command goes on after the last part that was finished.") from error


def _content_hash(hub: HubDataset) -> str:
    """xxh3_128 over the names and contents of the files that make up the split."""
    datasets = _import_datasets(hub)
    try:
        files = datasets.load_dataset_builder(hub.path, hub.config).config.data_files
    # datasets asks the hub for a folder that isn't there.
    except (FileNotFoundError, ConnectionError, ValueError, datasets.exceptions.DatasetNotFoundError) as error:
        raise UserError(f"{hub.name}: {_first_line(error)}", "Name a folder that holds data files.") from error
    splits = [str(split) for split in files or ()]
    if hub.split not in splits:
        raise UserError(f"{hub.name}: there is no split {hub.split!r}", f"Name one of {', '.join(splits) or 'none'}.")
    paths = [Path(file) for file in files[hub.split]]
    return xxhash.xxh3_128_hexdigest("".join(f"{path.name} {hash_file(path)}\n" for path in paths).encode())


def _import_datasets(hub: HubDataset) -> Any:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise UserError(
            f"{hub.name} needs the package datasets, which isn't installed", "Install it: pip install 'arriero[hub]'"
        ) from error
    return datasets


def _http_error() -> type[Exception]:
    """What the HTTP client of ``huggingface_hub`` raises for a line that is dead; its versions have different clients."""
    from huggingface_hub.errors import HfHubHTTPError

    return next(base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")


def _unreachable(hub: HubDataset, error: Exception, remedy: str) -> Unreachable:
    return Unreachable(f"{hub.name} can't be reached: {_first_line(error)}", remedy, exit_code=1)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
