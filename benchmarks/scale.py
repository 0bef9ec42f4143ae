"""What grows with ranks, rows and files, measured on one machine; Markdown tables for docs/scale.md.

python benchmarks/scale.py [--files 100000] [--ranks 64] [--folder /tmp]

The dataset is sparse: 10⁹ rows of 4,096 tokens in as many shards as --files says take no space but for their indexes.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from arriero.config.schema import Data
from arriero.data.loader import MicroBatch, Source, TrainingData, open_one
from arriero.data.order import Mixture, MixtureSource
from arriero.data.shards import _HEADER, _MAGIC, open_dataset

ROWS, SEQ_LEN, STEP_ROWS = 10**9, 4096, 4096
POSITION = 3_456_789_012


def timed(work: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    began = time.perf_counter()
    value = work(*arguments)
    return value, time.perf_counter() - began


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# --------------------------------------------------------------------------------------------------------------- order


def order(ranks: list[int]) -> None:
    """A rank's rows of one step, whose place is computed from its number; all ranks' together are the step's."""
    print(
        f"\n| ranks | a rank's rows of a step of {STEP_ROWS} | computed in | by all ranks each row once |\n| --: | --: | --: | --- |"
    )
    mixture = Mixture([MixtureSource("a", ROWS, 0.7), MixtureSource("b", ROWS, 0.3)], seed=1)
    whole = mixture.rows_at(POSITION, POSITION + STEP_ROWS)
    for size in ranks:
        share = STEP_ROWS // size
        parts, times = [], []
        for rank in range(size):
            part, took_s = timed(mixture.rows_at, POSITION + rank * share, POSITION + (rank + 1) * share)
            parts.append(part)
            times.append(took_s)
        same = np.array_equal(np.concatenate([part.row for part in parts]), whole.row)
        print(f"| {size} | {share} | {statistics.median(times) * 1e3:.2f} ms | {'yes' if same else 'NO'} |", flush=True)


# ------------------------------------------------------------------------------------------------------------ manifest


def sparse_dataset(folder: Path, files: int) -> Path:
    """A dataset as ``arriero prepare`` leaves it, of ``files`` shards and as many source files; its tokens are zeros."""
    tokens = ROWS * SEQ_LEN // files + SEQ_LEN
    shards = []
    folder.mkdir()
    # As few documents as the format allows: their number costs opening nothing, and 4 · 10⁸ would fill the disk.
    documents = -(-tokens // 10**9)
    lengths = np.full(documents, tokens // documents, dtype="<i4")
    lengths[-1] += tokens - int(lengths.sum(dtype=np.int64))
    starts = np.concatenate([[0], np.cumsum(lengths, dtype="<i8")[:-1]])
    index = _HEADER.pack(_MAGIC, 1, 8, documents, documents + 1) + lengths.tobytes()
    index += (2 * starts).astype("<i8").tobytes() + np.arange(documents + 1, dtype="<i8").tobytes()
    for number in range(files):
        name = f"train-{number:06}"
        with (folder / f"{name}.bin").open("wb") as file:
            file.truncate(tokens * 2)
        (folder / f"{name}.idx").write_bytes(index)
        shards.append(
            {
                "name": name,
                "documents": documents,
                "tokens": tokens,
                "bin_bytes": tokens * 2,
                "idx_bytes": len(index),
                "bin_xxh3": "0" * 32,
                "idx_xxh3": "0" * 32,
            }
        )
    manifest = {
        "format_version": 1,
        "fingerprint": "sparse",
        "tokenizer": {"fingerprint": "none", "eos_token_id": 0},
        "largest_id": 0,
        "sources": [{"path": f"corpus/{n:06}.jsonl.zst", "bytes": 10**9, "xxh3": "0" * 32} for n in range(files)],
        "splits": {
            "train": {"documents": documents * files, "tokens": tokens * files, "text_bytes": 0, "shards": shards}
        },
        "tables": [],
    }
    (folder / "dataset.json").write_bytes(orjson.dumps(manifest))
    return folder


def manifest(folder: Path, counts: list[int], ranks: int) -> None:
    print(
        "\n| shards | dataset.json | opened | again | memory | a row read | a rank's 64 rows of a step, the slowest of "
        f"{ranks} ranks |\n| --: | --: | --: | --: | --: | --: | --: |"
    )
    for files in counts:
        path = sparse_dataset(folder / f"d{files}", files)
        before = peak_bytes()
        _, first_s = timed(open_dataset, path)
        _, again_s = timed(open_dataset, path)
        source: Source = open_one(
            path, Data.model_validate({"sources": [{"path": str(path)}], "seq_len": SEQ_LEN, "validation_split": 0})
        )
        data = TrainingData([source], seed=1)
        memory = peak_bytes() - before
        times = []
        for rank in range(ranks):
            batches, took_s = timed(slice_of, data, rank, ranks)
            assert sum(len(batch.rows) for batch in batches) == 64
            times.append(took_s)
        print(
            f"| {files:,} | {(path / 'dataset.json').stat().st_size / 1e6:.1f} MB | {first_s:.2f} s | {again_s:.2f} s "
            f"| {memory / 2**20:.0f} MiB | {statistics.median(times) / 64 * 1e3:.2f} ms | {max(times) * 1e3:.0f} ms |",
            flush=True,
        )
        shutil.rmtree(path)


def slice_of(data: TrainingData, rank: int, ranks: int) -> list[MicroBatch]:
    """What one rank reads for a step of 64 rows a rank."""
    end = len(data.sources[0].training)
    return list(data.micro_batches(0, end=end, rank=rank, size=ranks, micro_batch=8, accumulation=8))


# ---------------------------------------------------------------------------------------------------------- rendezvous


def rendezvous(counts: list[int]) -> None:
    """Processes that meet by gloo over TCP on this machine, add up a number, gather a recipe's worth and wait for all."""
    import torch  # before the fork, so that 64 processes share it
    import torch.distributed as dist

    from arriero.engine.parallel import World
    from arriero.planner.layouts import Layout

    print(
        "\n| ranks | to meet | a step's numbers added up | 4 kB gathered from each | sockets of a rank |\n| --: | --: | --: | --: | --: |"
    )
    for size in counts:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        reader, writer = os.pipe()
        children = []
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                torch.set_num_threads(1)
                os.environ["GLOO_SOCKET_IFNAME"] = "lo"
                began = time.perf_counter()
                dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
                world = World(rank, size, 0, torch.device("cpu"), Layout(size))
                world.barrier()
                meet_s = time.perf_counter() - began
                sums_s = timed(add_up, world, 20)[1] / 20
                gather_s = timed(world.gather, "x" * 4096)[1]
                sockets = sum(1 for link in Path("/proc/self/fd").iterdir() if _is_socket(link))
                if rank == 0:
                    os.write(writer, orjson.dumps([meet_s, sums_s, gather_s, sockets]))
                world.barrier()
                os._exit(0)
            children.append(pid)
        for pid in children:
            os.waitpid(pid, 0)
        meet_s, sums_s, gather_s, sockets = orjson.loads(os.read(reader, 4096))
        print(f"| {size} | {meet_s:.2f} s | {sums_s * 1e3:.1f} ms | {gather_s * 1e3:.0f} ms | {sockets} |", flush=True)


def add_up(world: Any, times: int) -> None:
    for _ in range(times):
        world.total([1.0] * 5)


def _is_socket(link: Path) -> bool:
    try:
        return link.readlink().name.startswith("socket:")
    except OSError:
        return False


# ---------------------------------------------------------------------------------------------------------- heartbeats


def write_all(beats: list[Any]) -> None:
    for beat in beats:
        beat._write()


def heartbeats(folder: Path, counts: list[int]) -> None:
    from arriero.monitor.heartbeat import Heartbeat, diverged, read_beats

    print("\n| ranks | files replaced a second | one written in | all read in |\n| --: | --: | --: | --: |")
    for size in counts:
        run = folder / f"run{size}"
        (run / "heartbeats").mkdir(parents=True)
        beats = [Heartbeat(run, rank=rank, size=size, on_hang=print) for rank in range(size)]
        _, written_s = timed(write_all, beats)
        found, read_s = timed(read_beats, run)
        assert len(found) == size
        assert diverged(found, size, time.time()) == []
        print(f"| {size:,} | {size / 2:.0f} | {written_s / size * 1e6:.0f} µs | {read_s * 1e3:.0f} ms |", flush=True)


# -------------------------------------------------------------------------------------------------------- checkpoints


def checkpoints() -> None:
    """From sizes alone: 12 bytes a parameter, each rank what it owns, all hosts at once."""
    print(
        "\n| parameters | ranks (hosts) | checkpoint | a rank's file | a host writes | at 2 GB/s a host | slices in the manifest |\n"
        "| --: | --: | --: | --: | --: | --: | --: |"
    )
    for name, parameters, tensors in (("7B", 6.74e9, 291), ("70B", 69e9, 723)):
        for ranks in (64, 512, 4096):
            hosts = ranks // 8
            size = 12 * parameters
            print(
                f"| {name} | {ranks:,} ({hosts}) | {size / 1e9:.0f} GB | {size / ranks / 1e6:.0f} MB | {size / hosts / 1e9:.2f} GB "
                f"| {size / hosts / 2e9:.1f} s | {tensors + ranks:,} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--folder", type=Path, help="where the sparse dataset goes; default: the temporary folder")
    args = parser.parse_args()
    order([1, args.ranks, 1024])
    with tempfile.TemporaryDirectory(prefix="arriero-scale-", dir=args.folder) as name:
        manifest(Path(name), [10, 1000, args.files], args.ranks)
        heartbeats(Path(name), [args.ranks, 1024])
    rendezvous([2, 16, args.ranks])
    checkpoints()


if __name__ == "__main__":
    main()
