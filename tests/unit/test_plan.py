"""Devices, times, the ranking of layouts, and the command that prints them."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from arriero.cli.main import app
from arriero.config.schema import Model, ModelShape, Recipe
from arriero.errors import UserError
from arriero.planner import calibration
from arriero.planner.arithmetic import Setup, flops_per_token, parameter_count
from arriero.planner.hardware import DEVICES, find_device, find_network, for_rank, gpus_here, this_cpu
from arriero.planner.memory import Practice
from arriero.planner.plan import Planner, fits, plan, recipe_lines
from arriero.planner.shape import shape_of_model
from arriero.planner.throughput import Links, StepTime, step_time, tokens_per_second, utilization

ROOT = Path(__file__).parents[2]
H100, FAST = DEVICES["H100-SXM"], find_network("infiniband-3200")
LLAMA_8B = ModelShape(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128_256,
)
GIVEN: dict[str, Any] = {"parameters": 8_030_261_248, "vocab_size": 128_256, "seq_len": 8192}


def recipe(**sections: Any) -> Recipe:
    value: dict[str, Any] = {
        "model": {"config": LLAMA_8B.model_dump(exclude_unset=True), "tokenizer": "nowhere"},
        "data": {"sources": [{"path": "nowhere"}], "seq_len": 8192},
        "train": {"global_batch_size": 512, "max_tokens": "100B"},
    }
    merged = {name: value.get(name, {}) | sections.get(name, {}) for name in [*value, *sections]}
    return Recipe.model_validate({"output_dir": "unused", **merged})


def seconds(layout: Setup, device: Any = H100, network: Any = FAST, practice: Practice | None = None) -> StepTime:
    return step_time(LLAMA_8B, layout, device, network, **GIVEN, practice=practice or Practice())


# ----------------------------------------------------------------------------------------------------------------- devices


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("H100", "H100-SXM"),
        ("h100-sxm", "H100-SXM"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("a100", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("4090", "RTX-4090"),
        ("L40S", "L40S"),
        ("cpu", "cpu"),
    ],
)
def test_devices_by_the_names_of_people_and_drivers(written: str, name: str) -> None:
    assert find_device(written).name == name


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"--gpu TPU: not in the table\nKnown: A100-40GB, .*, cpu"):
        find_device("TPU")
    for name in ("infiniband", "infiniband-fast", "token-ring-16", "ethernet-0"):
        with pytest.raises(UserError, match="expected infiniband, roce, ethernet"):
            find_network(name)


def test_the_table_is_plausible() -> None:
    for device in DEVICES.values():
        assert 1e14 < device.peak_flops < 3e15
        assert 0.2 < device.attention_share < device.gemm_share < 0.95
        assert find_network(device.network).node_bytes_s > 1e9
        assert device.peak("bf16") == device.peak("fp16") > device.peak("fp32")
    assert DEVICES["H100-SXM"].memory_bytes == 80 * 2**30


def test_this_cpu_is_shared_by_its_ranks() -> None:
    cpu = this_cpu()
    assert 1e9 < cpu.fp32_flops < 1e14
    assert cpu.memory_bytes > 2**30
    assert for_rank(cpu, 2).peak_flops == cpu.peak_flops / 2
    assert gpus_here()[1] >= 1


def test_a_calibrated_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "FILE", tmp_path / "cache" / "calibration.json")
    assert calibration.calibrated(this_cpu())[1] is None
    assert calibration.rank_device("cpu", 1) is None
    rates = {"bf16_flops": 2e11, "fp32_flops": 1e11, "attention_flops": 4e10, "memory_bytes_s": 1e10}
    found = {**rates, "masked_flops": 5e10, "link_bytes_s": 3e9, "hop_s": 1e-3}
    calibration.save_calibration("cpu", found, ranks=2)
    assert calibration.measured_rates("cpu") == found
    measured, day = calibration.calibrated(this_cpu())
    assert day
    # Each of two ranks had half of the machine.
    assert (measured.peak_flops, measured.memory_bytes_s, measured.link_bytes_s) == (4e11, 2e10, 3e9)
    assert measured.attention_share == pytest.approx(0.9 * 0.2)
    assert calibration.rank_device("cpu", 2) == for_rank(measured, 2)
    assert for_rank(measured, 2).peak("fp32") == 1e11
    assert (for_rank(measured, 2).masked_flops, measured.hop_s) == (0.9 * 5e10, 1e-3)
    assert calibration.rank_device("NVIDIA H100 80GB HBM3", 4) == replace(H100, per_node=4)
    assert calibration.rank_device("Abacus 3000", 1) is None
    gpu = {**rates, "bf16_flops": 6e14, "attention_flops": 3e14, "host_bytes_s": 5e10}
    calibration.save_calibration("H100-SXM", gpu, ranks=1)
    measured, _ = calibration.calibrated(H100)
    assert measured.peak_flops == H100.peak_flops
    assert measured.gemm_share == pytest.approx(0.9 * 6e14 / 989.4e12)


# ------------------------------------------------------------------------------------------------------------------- times


def test_a_ring_by_hand() -> None:
    """8 ranks of one node gather 8 GB: seven eighths of it over 450 GB/s at 62 %, and seven hops."""
    links = Links(H100, FAST)
    assert links.ring(8e9, 8) == pytest.approx(7e9 / (450e9 * 0.62) + 7 * 1.5e-6)
    # 16 ranks: over the node's 8 × 400 Gb/s.
    assert links.ring(8e9, 16) == pytest.approx(7.5e9 / (400e9 * 0.62) + 15 * 3e-6)
    assert links.ring(8e9, 1) == 0
    assert links.exchange(8e9, 1) == 0


def test_a_hop_crosses_the_network_only_between_nodes() -> None:
    """Ranks of one CPU hand each other hidden states through its memory, however many could be on it."""
    links = Links(H100, FAST)
    assert links.hop(1e9, 8) == pytest.approx(1e9 / (450e9 * 0.62) + H100.hop_s)
    assert links.hop(1e9, 16) == pytest.approx(1e9 / (50e9 * 0.62) + FAST.hop_s)
    cpu = Links(this_cpu(), find_network("ethernet-10"))
    assert cpu.hop(1e9, 2) == pytest.approx(1e9 / (2e9 * 0.62) + 130e-6)


def test_matrix_products_by_hand() -> None:
    """One layer of width 4,096 whose weights are all square: 6 operations a weight and token, at 0.64 of the peak and
    4096 / 4396 of that."""
    shape = ModelShape(
        hidden_size=4096, intermediate_size=4096, num_hidden_layers=1, num_attention_heads=32, tie_word_embeddings=True
    )
    given = {"parameters": parameter_count(shape, 4096), "vocab_size": 4096, "seq_len": 1024}
    found = step_time(shape, Setup(), H100, FAST, **given)
    weights = (4 + 3 + 1) * 4096 * 4096  # attention, feed-forward, head
    assert found.matrix == pytest.approx(6 * 1024 * weights / (989.4e12 * 0.64 * 4096 / 4396))
    assert found.attention == pytest.approx(3.5 * 2 * 1024 * 1024 * 4096 / (989.4e12 * 0.32))
    assert (found.exposed_communication, found.bubble) == (0, 0)


def test_recomputing_costs_a_forward_pass_of_the_layers() -> None:
    plain, again = seconds(Setup()), seconds(Setup(checkpoint_every=1))
    assert 1.2 < again.total / plain.total < 4 / 3
    assert plain.total < seconds(Setup(checkpoint_every=2)).total < again.total


def test_a_pipelines_bubble() -> None:
    """The last stage has the head and is the slowest; it waits for one micro-batch of each stage before it."""
    found = seconds(Setup(ranks=4, pipeline=4, accumulation=12))
    busy = found.matrix + found.attention + found.memory_bound + found.exposed_communication
    head = 3 * 2 * 8192 * 4096 * 128_256 / (989.4e12 * 0.64 * 4096 / 4396)
    loss = 8192 * 128_256 * 10 / (0.67 * 3350e9)  # logits in bf16 and fp32, once over
    assert found.bubble == pytest.approx(3 * (busy / 12 - head - loss), rel=0.005)


def test_attention_with_a_mask_has_a_rate_of_its_own() -> None:
    """On a CPU torch's kernel is as fast in fp32 as in bf16, where products are five times faster."""
    cpu = replace(this_cpu(), peak_flops=5e11, fp32_flops=1e11, attention_share=0.3, masked_flops=8e10)
    times = {}
    for precision, attention in (("bf16", "blocks"), ("bf16", "masked"), ("fp32", "masked")):
        times[precision, attention] = seconds(
            Setup(), device=cpu, practice=Practice(precision=precision, attention=attention)
        )
    scores = 3.5 * 32 * 4 * 8192 * 8192 * 4096
    assert times["fp32", "masked"].attention == pytest.approx(scores / 8e10)
    assert times["bf16", "masked"].attention == times["fp32", "masked"].attention
    assert times["bf16", "blocks"].attention < 0.4 * scores / 8e10
    # Narrow matrices cost less of a slower rate: what is moved for them takes the same time.
    ratio = times["fp32", "masked"].matrix / times["bf16", "masked"].matrix
    assert 4.8 < ratio < 5


def test_collectives_of_model_parallelism_are_counted_one_by_one() -> None:
    """DeepSpeed sums the input's gradient once for each of q, k, v, gate and up: 7 all-reduces a layer, of 2 hops each on
    two ranks; Ulysses has 4 exchanges forward and 4 backward."""
    slow, fast = replace(H100, hop_s=1e-2), replace(H100, hop_s=0.0)

    def hops(practice: Practice = Practice(), **axis: int) -> float:
        layout = Setup(ranks=2, zero_stage=1, **axis)
        found = [seconds(layout, device=device, practice=practice).exposed_communication for device in (slow, fast)]
        return (found[0] - found[1]) / 1e-2

    assert hops(tensor=2) == pytest.approx(32 * 7 * 2)
    assert hops(Practice(deepspeed=False), tensor=2) == pytest.approx(32 * 4 * 2)
    # And the optimizer's two rings over both ranks.
    assert hops(sequence=2) == pytest.approx(32 * 8 + 2, rel=0.01)


def test_python_of_zero_3_counts_where_it_computes_too() -> None:
    cpu, layout = this_cpu(), Setup(micro_batch=1)
    first, third = (seconds(replace(layout, zero_stage=stage), device=cpu).total for stage in (2, 3))
    assert third - first == pytest.approx(32 * 12 * 0.25e-3, rel=0.05)
    first, third = (seconds(replace(layout, zero_stage=stage)).total for stage in (2, 3))
    assert third == first, "a GPU's kernels are long enough to hide it"


def test_offload_waits_for_the_host() -> None:
    near, far = (seconds(Setup(ranks=8, zero_stage=2, offload_optimizer=where)) for where in ("none", "cpu"))
    # A node's Adam moves 38 bytes of 8 billion parameters at 120 GB/s: 2.5 s.
    assert far.optimizer == pytest.approx(38 * GIVEN["parameters"] / 120e9, rel=0.1)
    assert near.optimizer < 0.05


@settings(max_examples=60, deadline=None)
@given(
    ranks=st.sampled_from([8, 16, 64, 512]),
    stage=st.integers(1, 3),
    rows=st.sampled_from([1, 4]),
    tensor=st.sampled_from([1, 2, 8]),
)
def test_times_move_the_right_way(ranks: int, stage: int, rows: int, tensor: int) -> None:
    layout = Setup(ranks=ranks, zero_stage=stage, micro_batch=rows, tensor=tensor)
    found = seconds(layout)
    assert found.total > 0
    assert min(found.__dict__.values()) >= 0
    assert seconds(replace(layout, accumulation=2)).total > found.total
    assert seconds(replace(layout, micro_batch=2 * rows)).total > found.total
    assert seconds(layout, network=find_network("ethernet-100")).total >= found.total
    assert seconds(layout, device=replace(H100, gemm_share=0.3)).total > found.total
    assert seconds(layout, practice=Practice(compiled=False)).total > found.total
    # Hardly faster for each GPU with more of them: the update is split further, everything else isn't.
    each, more = (tokens_per_second(one, 8192, seconds(one).total) / one.ranks for one in (layout, replace(layout, ranks=2 * ranks)))  # fmt: skip
    assert more <= each * 1.01


def test_mfu_counts_what_the_model_needs() -> None:
    """Grouped queries and three feed-forward matrices as they are, no padding, no recomputation."""
    flops = flops_per_token(LLAMA_8B, 128_256, 8192)
    weights = GIVEN["parameters"] - 128_256 * 4096 - (2 * 32 + 1) * 4096
    assert flops == 6 * weights + 6 * 32 * 8192 * 4096
    assert utilization(flops, 8 * 6000, 8, H100.peak_flops) == pytest.approx(flops * 6000 / 989.4e12)


# ----------------------------------------------------------------------------------------------------------------- ranking


def planner(gpus: int = 64, **sections: Any) -> Planner:
    return plan(recipe(**sections), gpus=gpus, gpu="H100-SXM")


def test_the_best_comes_first() -> None:
    found = planner().ranked()
    fitting = [one.fits for one in found]
    assert fitting == sorted(fitting, reverse=True)
    assert fitting[0]
    assert not all(fitting), "ZeRO-1 without recomputation needs 100 GiB"
    times = [one.time.total for one in found if one.fits]
    assert times[0] <= 1.02 * min(times)
    assert sum(one.own for one in found) == 1
    for one in found:
        layout = one.layout
        assert layout.dp * layout.micro_batch * layout.accumulation == 512
        assert one.tokens_per_second == pytest.approx(512 * 8192 / one.time.total)
        assert one.days == pytest.approx(100e9 / one.tokens_per_second / 86_400)
        assert one.cost == pytest.approx(one.days * 24 * 64 * 3.0)
        assert 0 < one.mfu < 0.7
        assert one.checkpoint_bytes == 12 * GIVEN["parameters"]


def test_more_memory_is_asked_for_before_more_gpus() -> None:
    """8B with its state is 128 GB: one H100 can't without the host's memory, eight can."""
    alone = [one for one in planner(gpus=1).ranked() if one.fits]
    assert {one.layout.offload_optimizer for one in alone} == {"cpu"}
    assert all(one.memory.host > 12 * GIVEN["parameters"] for one in alone)
    assert any(one.fits and one.layout.offload_optimizer == "none" for one in planner(gpus=8).ranked())


def test_what_the_schema_refuses_is_not_proposed() -> None:
    found = planner().ranked()
    assert all(one.layout.zero_stage for one in found), "stage 0 in bf16 is refused"
    for one in found:
        keys = yaml.safe_load(recipe_lines(one))
        again = recipe(**{name: {**recipe().model_dump()[name], **keys[name]} for name in ("train", "parallel")})
        assert plan(again, gpus=64, gpu="H100-SXM").own_layout() == one.layout


def test_the_recipes_own_layout() -> None:
    own = planner(train={"per_device_train_batch_size": 2, "activation_checkpointing": True, "max_tokens": "1B", "global_batch_size": 256}, parallel={"zero_stage": 3}).own_layout()  # fmt: skip
    assert own == Setup(64, 3, micro_batch=2, accumulation=2, checkpoint_every=1)
    with pytest.raises(UserError, match=r"512 = per_device_train_batch_size 1 × accumulation × 60"):
        planner(gpus=60).own_layout()
    # 60 ranks are 4 pipelines of 15 stages at best; of a prime number of them nothing divides 512 rows.
    assert {one.layout.pipeline for one in planner(gpus=60).ranked()} == {15, 30}
    assert planner(gpus=61).ranked() == []


def test_smaller_nodes_send_more_between_them() -> None:
    layout = Setup(16, 3, checkpoint_every=1, accumulation=32)
    eight, four = (
        plan(recipe(), gpus=16, gpu="H200", per_node=count, network="infiniband-1600").forecast(layout)
        for count in (8, 4)
    )
    assert eight.time.total <= four.time.total
    tensor = Setup(16, 1, tensor=8, accumulation=256)
    eight, four = (
        plan(recipe(), gpus=16, gpu="H200", per_node=count, network="infiniband-1600").forecast(tensor)
        for count in (8, 4)
    )
    assert four.time.total > 1.1 * eight.time.total, "eight tensor ranks over two nodes"


def test_a_run_in_epochs_has_no_length_without_its_data() -> None:
    one = planner(train={"max_tokens": None, "num_train_epochs": 2, "global_batch_size": 64}).ranked()[0]
    assert (one.days, one.cost) == (None, None)


def test_fits_counts_the_nodes_memory_too() -> None:
    one = planner().forecast(Setup(64, 3, micro_batch=1, accumulation=8, checkpoint_every=1, offload_optimizer="cpu"))
    machine = planner().machine
    assert fits(one.memory, machine)
    small = replace(machine, device=replace(machine.device, host_memory_bytes=8 * 2**30))
    assert not fits(one.memory, small)


# ------------------------------------------------------------------------------------------------------ shapes from files


def test_a_shape_from_a_folder_and_from_a_tokenizer(tmp_path: Path) -> None:
    config = LLAMA_8B.model_dump(exclude_none=True) | {"torch_dtype": "bfloat16", "bos_token_id": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape, vocab = shape_of_model(Model(model_name_or_path=str(tmp_path)))
    assert (shape, vocab) == (LLAMA_8B, 128_256)
    tokens = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 1}, {"id": 2}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokens))
    small = LLAMA_8B.model_copy(update={"vocab_size": None})
    assert shape_of_model(Model(config=small, tokenizer=str(tmp_path)))[1] == 3
    with pytest.raises(
        UserError, match=r"depends on its tokenizer's, and there is no .*\nGive model.config.vocab_size"
    ):
        shape_of_model(Model(config=small, tokenizer=str(tmp_path / "none")))
    (tmp_path / "config.json").write_text('{"vocab_size": 5, "d_model": 3}')
    with pytest.raises(UserError, match="doesn't describe a LLaMA-like model"):
        shape_of_model(Model(model_name_or_path=str(tmp_path)))


# -------------------------------------------------------------------------------------------------------------- the command

PARTS = {"parameters", "gradients", "optimizer", "activations", "logits", "buffers", "total"}
KEYS = {
    "zero_stage", "tensor_parallel_size", "sequence_parallel_size", "pipeline_parallel_size", "offload_optimizer",
    "offload_param", "per_device_train_batch_size", "gradient_accumulation_steps", "activation_checkpointing", "fits",
    "memory_bytes", "host_memory_bytes", "step_time_s", "tokens_per_second", "mfu", "days", "cost",
}  # fmt: skip


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe().model_dump(mode="json", exclude_defaults=True)))
    return path


def test_json(written: Path) -> None:
    done = CliRunner().invoke(
        app, ["plan", str(written), "data.seq_len=4096", "--gpus", "8", "--gpu", "a100", "--price", "1", "--json"],
        catch_exceptions=False,
    )  # fmt: skip
    assert done.exit_code == 0
    value = json.loads(done.stdout)
    assert (value["gpu"], value["gpus"], value["parameters"]) == ("A100-80GB", 8, GIVEN["parameters"])
    for layout in value["layouts"]:
        assert layout.keys() >= KEYS
        assert layout["memory_bytes"].keys() == PARTS
        assert layout["cost"] == pytest.approx(layout["days"] * 24 * 8)
    assert sum(layout["recipe"] for layout in value["layouts"]) == 1


def test_text(written: Path) -> None:
    def said(*arguments: str) -> str:
        return CliRunner().invoke(app, ["plan", str(written), *arguments], catch_exceptions=False).stdout

    text = said("--gpus", "64", "--gpu", "H100")
    assert "8.03B parameters, 100B tokens, bf16, rows of 8,192" in text
    assert "64 × H100-SXM with 80.0 GiB, infiniband-3200 between nodes, 3 per GPU-hour" in text
    assert "lines for the best:\ntrain:\n  per_device_train_batch_size: " in text
    assert "the recipe's layout (*):\n  memory      parameters 15.0 GiB" in text
    assert "nothing fits" in said("data.seq_len=1M", "--gpus", "1", "--gpu", "4090")
    assert "the recipe as it stands doesn't come out: train.global_batch_size 512" in said(
        "--gpus", "3", "--gpu", "H100"
    )


def test_plan_without_a_recipe_says_so() -> None:
    done = CliRunner().invoke(app, ["plan"])
    assert isinstance(done.exception, UserError)
    assert "which RECIPE?" in done.exception.problem


# ---------------------------------------------------------------------------------------------------------- published runs


@pytest.fixture(scope="module")
def scored() -> Any:
    spec = importlib.util.spec_from_file_location("make_planner_page", ROOT / "docs" / "make_planner_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["make_planner_page"] = module
    spec.loader.exec_module(module)
    return module


def test_published_runs_are_met_as_the_page_says(scored: Any) -> None:
    found = {(quantity, group, part): (count, middle, most) for quantity, group, part, count, middle, most in scored.summary(scored.runs())}  # fmt: skip
    # The goals for LLaMA rows: 12 % on tokens per second, 10 % on memory; held-out rows as well as fitted ones.
    for part in ("fit", "held"):
        assert found["tokens", "llama", part][1] <= 0.12
        assert found["memory", "llama", part][1] <= 0.10
        assert found["tokens", "mpt", part][1] <= 0.12
    assert found["tokens", "llama", "fit"][0] >= 25
    text = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")
    for (quantity, group, _), (count, middle, most) in found.items():
        name = {"tokens": "tokens/s", "memory": "memory"}[quantity]
        row = rf"| {name} | {scored.GROUPS[group]} | "
        assert any(
            line.startswith(row) and line.endswith(f"| {count} | {100 * middle:.1f} % | {100 * most:.1f} % |")
            for line in text.splitlines()
        )


def test_the_page_and_its_chart_are_made_by_the_script(scored: Any) -> None:
    assert scored.page() == scored.PAGE.read_text(encoding="utf-8"), "make docs writes it"
    assert scored.chart() == scored.CHART.read_text(encoding="utf-8"), "make docs writes it"


def test_a_scale_that_falls(scored: Any) -> None:
    speeds = [speed for speed in scored.scaling("L3-8B", "ethernet-400") if speed is not None]
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[-1] < 0.5 * speeds[0]
