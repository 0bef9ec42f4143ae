"""What a recipe costs and how sure that is, in the lines that a recipe opens with."""

from __future__ import annotations

from arriero.planner.hardware import PRICES_FROM
from arriero.planner.plan import Forecast, Planner
from arriero.units import format_bytes, format_count, format_time

# (runs, median error, 90th percentile) of published LLaMA runs, without and with tensor parallelism, and layouts on CPUs:
# docs/planner.md, to which tests/unit/test_recipes.py holds them.
SPEED_SCORE = (29, "2.0 %", "8.6 %")
MEMORY_SCORE = (14, "4.8 %", "40.0 %")
TENSOR_SCORE = (10, "17.4 %", "25.7 %")
CPU_LAYOUTS = 31
# GPUs whose rates are fitted to published runs; of the others they are taken over from the one that is most alike.
_FITTED = ("A100-40GB", "A100-80GB", "H100-SXM", "H100-96GB", "H200")


def cost_line(planner: Planner, forecast: Forecast) -> str:
    """As in ``51.2 GiB of 80.0 GiB a GPU, 58k tokens/s, MFU 38 %, 1d 23h, about 1,140 $ (8 × H100-SXM at 3 $ an hour)``."""
    machine = planner.machine
    device = machine.rank_device
    unit = "rank" if device.is_cpu else "GPU"
    words = [
        f"{format_bytes(forecast.memory.total)} of {format_bytes(device.memory_bytes)} a {unit}"
        + (f" and {format_bytes(forecast.memory.host)} of the host's" if forecast.memory.host else ""),
        f"{format_count(forecast.tokens_per_second)} tokens/s",
        *([] if device.is_cpu else [f"MFU {forecast.mfu:.0%}".replace("%", " %")]),
    ]
    if forecast.days is not None:
        words.append(format_time(forecast.days * 86_400))
    where = f"{machine.ranks} × {'this CPU' if machine.ranks == 1 else 'a part of this CPU'}"
    where = where if device.is_cpu else f"{machine.ranks} × {machine.device.name}"
    if forecast.cost is not None:
        words.append(f"about {float(f'{forecast.cost:.2g}'):,.0f} $" if forecast.cost >= 1 else "less than 1 $")
        where += f" at {machine.price_per_hour:g} $ an hour, list price of {PRICES_FROM}"
    return f"{', '.join(words)} ({where})"


def certainty(planner: Planner, forecast: Forecast) -> str:
    """How far such a plan has been off, as far as anybody knows."""
    layout, device = forecast.layout, planner.machine.device
    if device.is_cpu:
        return (
            f"memory of {CPU_LAYOUTS} layouts on a CPU is met within 5 %; times hold only behind `arriero plan --calibrate` "
            "on this machine"
        )
    unscored = []
    if device.name not in _FITTED:
        unscored.append(f"no published run on {device.name} could be scored, its rates are those of its like")
    if layout.offload_optimizer != "none":
        unscored.append("no published run with offload could be scored")
    if layout.sequence > 1 or layout.pipeline > 1:
        unscored.append("no published run whose ranks share rows or layers could be scored")
    if layout.tensor > 1:
        runs, median, most = TENSOR_SCORE
        unscored.append(
            f"tokens/s of {runs} runs with tensor parallelism are off by {median} in the median, {most} at most nine times in ten"
        )
    if unscored:
        return f"roughly: {'; '.join(unscored)}"
    (runs, median, most), (memory_runs, memory_median, memory_most) = SPEED_SCORE, MEMORY_SCORE
    return (
        f"tokens/s of {runs} published runs like it are met within {median} in the median and {most} nine times in ten, "
        f"memory of {memory_runs} within {memory_median} and {memory_most}"
    )
