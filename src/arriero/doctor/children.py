"""What is tried in child processes: a broken build may abort the interpreter, and a network may hang."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

# Each line that is ours carries a mark: importing deepspeed prints to stdout.
_MARK = "arriero-doctor "


IMPORTS = """
import importlib, json, sys, time
def tell(**words): print("arriero-doctor " + json.dumps(words), flush=True)
for name in sys.argv[1:]:
    tell(begin=name)
    try:
        importlib.import_module(name)
    except BaseException as error:
        tell(module=name, error=f"{type(error).__name__}: {error}".splitlines()[0])
    else:
        tell(module=name, error=None)
try:
    import torch
except BaseException:
    sys.exit()
devices, failed, memory, peers, nccl_failed, link = [], None, [], None, None, None
try:
    for index in range(torch.cuda.device_count()):
        devices.append(torch.cuda.get_device_name(index))
        memory.append(torch.cuda.get_device_properties(index).total_memory)
        square = torch.ones(256, 256, device=f"cuda:{index}")
        if (square @ square).sum().item() != 256.0 ** 3:
            failed = f"cuda:{index} gives a wrong product"
except Exception as error:
    failed = str(error).splitlines()[0]
if len(devices) > 1 and failed is None:
    try:
        every = range(len(devices))
        peers = sum(torch.cuda.can_device_access_peer(a, b) for a in every for b in every if a != b)
        ones = [torch.ones(1 << 20, device=f"cuda:{index}") for index in every]
        torch.cuda.nccl.all_reduce(ones)
        if any(one.mean().item() != len(devices) for one in ones):
            nccl_failed = "a sum over all GPUs came out wrong"
        here, there = (torch.zeros(256 << 20, dtype=torch.uint8, device=f"cuda:{index}") for index in (0, 1))
        for _ in range(2):
            torch.cuda.synchronize(0), torch.cuda.synchronize(1)
            began = time.perf_counter()
            there.copy_(here)
            torch.cuda.synchronize(0), torch.cuda.synchronize(1)
            link = here.numel() / (time.perf_counter() - began)
    except Exception as error:
        nccl_failed = str(error).splitlines()[0]
distributed = torch.distributed.is_available()
nccl = distributed and torch.distributed.is_nccl_available()
tell(torch=dict(
    build=torch.version.cuda or torch.version.hip, devices=devices, failed=failed,
    memory=memory, peers=peers, nccl_failed=nccl_failed, link=link,
    nccl=".".join(map(str, torch.cuda.nccl.version())) if nccl and devices else None,
    capability=torch.backends.cpu.get_cpu_capability(),
    bf16=torch.ops.mkldnn._is_mkldnn_bf16_supported(), fp16=torch.ops.mkldnn._is_mkldnn_fp16_supported(),
))
"""


# Two ranks in two threads: a real store, a real full mesh over the interface that gloo picks, a real sum.
# It ends at once: gloo's threads now and then abort Python as it takes itself apart (torch 2.13), all being well.
GLOO = """
import datetime, os, threading, torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore
limit, failed, sums = datetime.timedelta(seconds=10), [], {}
server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
def work(rank):
    try:
        client = TCPStore("127.0.0.1", server.port, is_master=False, timeout=limit)
        group = ProcessGroupGloo(PrefixStore("doctor", client), rank, 2, limit)
        value = torch.tensor([rank + 1.0])
        group.allreduce([value]).wait()
        sums[rank] = value.item()
    except Exception as error:
        failed.append(str(error).splitlines()[0])
ranks = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in (0, 1)]
for rank in ranks: rank.start()
for rank in ranks: rank.join(20)
if sums != {0: 3.0, 1: 3.0}:
    print(failed[0] if failed else f"no answer within 20 s, sums {sums}", flush=True)
    os._exit(1)
os._exit(0)
"""


CHILD_LIMIT_S = 180.0  # importing torch, deepspeed and transformers takes 3 s here, a minute from a cold network disk


class Child:
    """``python -c script arguments…``, its output in one pipe."""

    def __init__(self, script: str, *arguments: str) -> None:
        command = [sys.executable, "-c", script, *arguments]
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def result(self, limit_s: float) -> tuple[int | None, str]:
        """Exit code (None: stopped after ``limit_s``) and output."""
        try:
            output, _ = self.process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            output, _ = self.process.communicate()
            return None, output
        return self.process.returncode, output

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


class Answers:
    """What the import child said: an error or None by module, and facts about torch if it got that far."""

    def __init__(self, returncode: int | None, output: str) -> None:
        self.errors: dict[str, str | None] = {}
        self.torch: dict[str, Any] | None = None
        begun = None
        for line in output.splitlines():
            if not line.startswith(_MARK):
                continue
            said = json.loads(line.removeprefix(_MARK))
            begun = said.get("begin", begun)
            if "module" in said:
                self.errors[said["module"]] = said["error"]
            self.torch = said.get("torch", self.torch)
        if begun is not None and begun not in self.errors:
            how = f"no end within {CHILD_LIMIT_S:.0f} s" if returncode is None else f"died with code {returncode}"
            self.errors[begun] = f"the interpreter {how} while importing it"
