"""The ranks of a run: who this process is, and the few things that all ranks do together."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from arriero.errors import UserError
from arriero.planner.layouts import Layout


@dataclass(frozen=True)
class World:
    """This process among the ranks of a run. ``dp_rank`` and ``dp_size`` count those that see different rows."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    layout: Layout
    """Which ranks share one copy of the model."""
    local_size: int = 1
    """Ranks on this host."""

    @property
    def dp_rank(self) -> int:
        return self.layout.dp_rank(self.rank)

    @property
    def dp_size(self) -> int:
        return self.layout.dp

    def arranged(self, layout: Layout) -> World:
        """The same process in another layout of as many ranks."""
        assert layout.ranks == self.size, f"a layout of {layout.ranks} ranks for {self.size}"
        return replace(self, layout=layout)

    def total(self, values: Sequence[float] | Tensor) -> Tensor:
        """Element-wise sum over the replicas, fp64 on the CPU: exact for counts up to 2⁵³.

        The ranks of one replica see the same rows, so what they count is counted once; where only one of them has
        something, the sum is still above 0.
        """
        return self.sum_over_ranks(values) / self.layout.replica

    def sum_over_ranks(self, values: Sequence[float] | Tensor) -> Tensor:
        """Element-wise sum over all ranks, fp64 on the CPU."""
        numbers = torch.as_tensor(values, dtype=torch.float64).cpu()
        dist.all_reduce(numbers)
        return numbers

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank, in the order of ranks."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def from_first(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        holder = [value]
        dist.broadcast_object_list(holder, src=0)
        return holder[0]

    def on_first(self, work: Callable[[], Any]) -> Any:
        """Do something on rank 0 and give its result, or its ``UserError`` or ``OSError``, to every rank."""
        value: Any = None
        problem: UserError | None = None
        if self.rank == 0:
            try:
                value = work()
            except UserError as error:
                problem = error
            except OSError as error:
                problem = UserError(
                    str(error), "Free some space, or look at the disk; the same command goes on.", exit_code=1
                )
        value, problem = self.from_first((value, problem))
        if problem is not None:
            raise problem
        return value

    def barrier(self) -> None:
        dist.barrier()


def world_size() -> int:
    """Ranks of this job, by the launcher's word."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def choose_accelerator() -> None:
    """Without a GPU tell DeepSpeed so, before it is imported: it would look for accelerators by importing packages that
    may be half installed, and say on the terminal that it found none."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


# From malloc.h: what each of mallopt's parameters is called by.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """Let the C library keep what is freed for the next step, instead of giving it back to the kernel.

    A step on a CPU frees and asks again for several times the gradients, each time in pages that the kernel fills with
    zeros first: at 50M parameters that was a fifth of the step (1,050 → 840 ms, two threads). In return the process takes up
    to a tenth more at its peak (2.03 → 2.22 GB there), since holes don't always fit; what was freed before the first step
    ``give_back_freed_memory`` returns. Does nothing where the C library isn't glibc.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_M_MMAP_MAX, 0)
        library.mallopt(_M_TRIM_THRESHOLD, -1)


def give_back_freed_memory() -> None:
    """Return to the kernel what is free now, such as what loading took and no step asks for again."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def join_world(timeout_s: float = 1800.0) -> World:
    """Meet the other ranks: NCCL between GPUs, gloo between processors (and for objects).

    Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as torchrun, DeepSpeed's launcher and operators
    set them.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.is_available():
        # srun's --gpus-per-task and the like let each rank see its own GPU alone.
        device = torch.device("cuda", local_rank if torch.cuda.device_count() > 1 else 0)
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    else:
        choose_accelerator()
        keep_freed_memory()
        device = torch.device("cpu")
        backend = "gloo"
    timeout = timedelta(seconds=timeout_s)
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    # torch's elastic agent keeps its store when it starts the ranks again (torch 2.13), and in it the addresses of those
    # that died: each attempt has names of its own.
    attempt = PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(backend, timeout=timeout, store=attempt, rank=rank, world_size=size)
    # Only torchrun says it by this name; launch/environment.py translates the others'.
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return World(dist.get_rank(), size, local_rank, device, Layout(size), local_size)


def leave_world() -> None:
    """Without this a rank now and then aborts at exit, after everything was done."""
    if dist.is_initialized():
        dist.destroy_process_group()


def device_name() -> str:
    """What the driver calls this rank's GPU; ``cpu`` where there is none."""
    return str(torch.cuda.get_device_name()) if torch.cuda.is_available() else "cpu"


def device_memory_bytes(ranks_here: int) -> tuple[int, bool]:
    """(memory of one rank's device, whether it is a GPU); CPU ranks of a host share its memory."""
    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory), True
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // ranks_here, False


def memory_bytes() -> int:
    """Peak memory of this rank: allocated on its GPU, or resident on a CPU."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
