"""`megatoken plan`: fit, speed, cost, tables, and what it refuses."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from megatoken.base.config.load import load_config
from megatoken.base.config.presets import PRESETS
from megatoken.base.config.schema import Config
from megatoken.base.system.gpus import GPUS
from megatoken.cli.arguments import parse
from megatoken.cli.recipe import find_model
from megatoken.data.dataset import load_dataset
from megatoken.model.flops import count_parameters, flops_per_token
from megatoken.plan.compute_optimal import FITTED, split_compute
from megatoken.plan.estimate import SIZES, Plan, count_evaluated_tokens, plan_run
from megatoken.plan.speed import Layout, estimate_step
from tests.conftest import Ask, Call
from tests.convert.models import TINY_GPT, draw_model, save_run
from tests.tables import read_table
from tests.tiny_run import write_jsonl

H100 = GPUS["H100"]


def read_config(name: str, *overrides: str) -> Config:
    resolved, model, _ = find_model(parse(["describe", name, *overrides]))
    return replace(resolved.config, model=model)


def plan_recipe(arguments: str, **options: float) -> Plan:
    """Plan from a recipe, GPUs such as 8xH100, and overrides."""
    name, gpus, *overrides = arguments.split()
    count, gpu = gpus.split("x", 1)
    return plan_run(read_config(name, *overrides), GPUS[gpu], int(count), **options)


def test_published_run_of_llm_c():
    """GPT-2 124M on 10B tokens: 1 h 47 min, about $20 on eight A100s of 40 GB."""
    plan = plan_recipe("gpt2-124m 8xA100-40GB")
    assert plan.fits
    assert plan.hours == pytest.approx(107 / 60, rel=0.1)
    assert plan.dollars == [pytest.approx(20, rel=0.1)]
    assert plan.gpu_hours == plan.hours * 8
    assert plan.energy_kwh == pytest.approx(plan.gpu_hours * 0.4)
    flops = plan.tokens_per_second * flops_per_token(plan.model, causal=False)
    assert plan.mfu == pytest.approx(flops / (8 * 312e12))


def test_what_makes_it_fit():
    """7B fits 24 GB only with full sharding and recomputation on 16 cards; 175B does not fit at
    all.
    """
    plan = plan_recipe("gpt3-6.7b 16xRTX-4090", tokens=1e9)
    assert (plan.fits, plan.layout.sharding) == (True, "zero3")
    assert not plan_recipe("gpt3-175b 8xA100-40GB", tokens=1e9).fits
    pinned = plan_recipe("gpt2-124m 1xT4 machine.micro_batch=512")
    assert (pinned.fits, pinned.layout.micro_batch, pinned.layout.precision) == (False, 512, "fp16")
    for published in (
        "gpt2-1558m 8xH100 machine.micro_batch=16 machine.sharding=none",
        "gpt2-124m 8xA100-40GB machine.micro_batch=64 machine.sharding=zero1",
        "gpt3-1.3b 8xA100-40GB",
    ):
        assert plan_recipe(published).fits


def test_nothing_is_recomputed_that_fits():
    """The full batch fits at once, so recomputation gains nothing, although its time would hide
    communication."""
    for arguments in ("gpt2-124m 128xH100", "gpt3-125m 256xH100", "gpt2-355m 256xH100"):
        layout = plan_recipe(arguments).layout
        assert (layout.micro_steps, layout.checkpointing) == (1, "none"), arguments


def test_recomputation_that_was_chosen_is_named_or_refused(ask: Ask):
    gelu, none = (f"machine.activation_checkpointing={value}" for value in ("gelu", "none"))
    expected = {"": ("gelu", [gelu]), none: ("none", []), gelu: ("gelu", [])}
    for given, (chosen, settings) in expected.items():
        result = ask(f"plan gpt2-1558m --gpus 8xRTX-4090 {given}")
        sharding = f"machine.sharding={result['sharding']}"
        assert (result["checkpointing"], result["settings"]) == (chosen, [sharding, *settings])
    assert ask("plan gpt2-124m --gpus 128xH100")["settings"] == ["machine.sharding=zero2"]


def test_communication_of_many_reductions(ask: Ask):
    tp = "machine.tensor_parallel=8 machine.sharding=zero2 machine.micro_batch=1"
    result = ask(f"plan gpt3-175b --gpus 1024xH100 {tp}")
    # An eighth of the gradients in fp32 for each of 12 micro-batches, and weights in bf16.
    data = (12 * 4 + 2) * 174.6e9 / 8 * 127 / 128 / (0.75 * 400e9 / 8)
    tensors = 12 * 96 * 8 * 2 * 2048 * 12288 * 7 / 8 / (0.75 * 450e9)
    assert result["communication_seconds"] == pytest.approx(data + tensors, rel=0.01)
    assert result["communication_seconds"] > 3 * result["computing_seconds"]


def test_what_does_not_fit_has_no_price(ask: Ask):
    result = ask("plan gpt3-175b --gpus 8xH100 --deadline 1h")
    keys = ("hours", "gpu_hours", "dollars", "energy_kwh", "deadline")
    assert [result[key] for key in keys] == [None] * 5
    assert result["fewest_gpus"] == 48
    fitting = [gpus for gpus in (32, 48, 1024) if plan_recipe(f"gpt3-175b {gpus}xH100").fits]
    assert fitting == [48, 1024]  # 32 is the next divisor of 1,536 sequences
    pinned = ask("plan gpt2-124m --gpus 1xT4 machine.micro_batch=512")
    assert (pinned["fewest_gpus"], pinned["dollars"]) == (None, None)
    assert ask("plan gpt2-124m --gpus 1xT4")["dollars"] is None  # unknown price


def test_muon_adds_its_products_to_the_optimizer():
    """1.63e12 FLOP at 62% of 989e12 a second, shared by the GPUs."""

    def optimizer_seconds(gpus, name):
        layout = Layout(gpus=gpus, optimizer=name)
        return estimate_step(PRESETS["gpt2-124m"], H100, layout).parts["optimizer"]

    one, eight = (optimizer_seconds(n, "muon") - optimizer_seconds(n, "adamw") for n in (1, 8))
    assert one == pytest.approx(2.66e-3, rel=0.01)
    assert eight == pytest.approx(one / 8)


# GPU, machine.precision; precision, program. Before Ampere there is no TF32, and bf16 is emulated.
PROGRAMS = """\
T4 fp32 fp32 compiled
V100-32GB fp32 fp32 compiled
T4 bf16 bf16 compiled
RTX-3090 fp32 tf32 compiled
P100 auto fp32 eager
GTX-1080Ti auto fp32 eager
"""


@pytest.mark.parametrize("row", PROGRAMS.splitlines())
def test_products_in_a_precision_that_the_card_lacks_are_fp32(row: str):
    gpu, given, *expected = row.split()
    plan = plan_recipe(f"shakespeare 1x{gpu} machine.micro_batch=1 machine.precision={given}")
    assert [plan.layout.precision, plan.layout.program] == expected
    plain = estimate_step(plan.model, plan.gpu, replace(plan.layout, precision="fp32"))
    assert (plan.step.parts["products"] == plain.parts["products"]) == (
        plan.layout.precision != "tf32"
    )


def test_the_implementation_of_adamw_counts():
    """The published runs without and with the fused kernel reach 55,271 and 78,750 tokens/s."""
    for given, counted in {"auto": "fused", "loop": "foreach", "foreach": "foreach"}.items():
        plan = plan_recipe(f"shakespeare 1xH100 machine.adamw={given}")
        assert plan.step == estimate_step(plan.model, H100, Layout(program="fused", adamw=counted))


def test_compute_optimal_split():
    """Chinchilla: 5.76e23 FLOP are 67B parameters and 1.5T tokens by the first approach; 40B by the
    third.
    """
    parameters, tokens = split_compute(5.76e23, "chinchilla")
    assert (tokens, parameters) == pytest.approx((20 * parameters, 69.3e9), rel=0.01)
    fitted, fitted_tokens = split_compute(5.76e23, "fitted")
    best = FITTED.loss(fitted, fitted_tokens)
    for factor in (0.9, 1.1):
        assert FITTED.loss(fitted * factor, fitted_tokens / factor) > best
    assert [6 * parameters * tokens, 6 * fitted * fitted_tokens] == pytest.approx([5.76e23] * 2)


def test_a_budget_is_planned_at_the_speed_of_a_model_that_fits(ask: Ask):
    budget = ask("plan gpt3-125m --gpus 1xRTX-3090 --budget 1e6")["budget"]
    assert (budget["nearest"], budget["fitting"]) == ("gpt3-175b", "gpt3-760m")
    fitting = plan_recipe("gpt3-760m 1xRTX-3090 budget.batch_start=0 budget.batch_ramp=0")
    rate = fitting.tokens_per_second * 1e6 / GPUS["RTX-3090"].price * 3600
    assert budget["flops"] == pytest.approx(6 * count_parameters(fitting.model) * rate, rel=0.1)
    assert 6 * budget["parameters"] * budget["tokens"] == pytest.approx(budget["flops"])


def test_evaluations_before_the_first_step_and_at_the_end_are_counted():
    arguments = ("budget.steps=100", "budget.batch_tokens=512", "evaluate.tokens=1000")
    for every, evaluations in {"30steps": 5, "0.5dur": 3, "0": 1}.items():
        config = load_config("quickstart", *arguments, f"evaluate.every={every}")
        assert count_evaluated_tokens(config, 51_200) == 1000 * evaluations


def test_a_batch_that_grows_takes_longer(ask: Ask):
    """Half of the tokens in batches of 128 sequences, half in 256, on 16 GPUs. A first batch is
    rounded up so that it divides.
    """
    common = "gpt2-124m 16xH100 budget.tokens=1e9 evaluate.every=0 machine.sharding=zero1"
    whole = plan_recipe(f"{common} budget.batch_tokens=262144")
    half = plan_recipe(f"{common} budget.batch_tokens=131072")
    grown = "budget.batch_tokens=262144 budget.batch_start=131072 budget.batch_ramp=500e6"
    plan = plan_recipe(f"{common} {grown}")
    assert plan.tokens_per_second == whole.tokens_per_second
    assert (whole.layout.micro_batch, half.layout.micro_batch) == (16, 8)
    assert half.hours > 1.1 * whole.hours
    assert plan.hours == pytest.approx((whole.hours + half.hours) / 2, rel=0.01)
    ramp = "budget.batch_start=16384 budget.batch_ramp=500e6"
    result = ask(f"plan gpt2-124m --gpus 32xH100 {ramp}")
    assert "budget.batch_start=32768" in result["settings"]
    times = {row["gpus"]: row["hours"] for row in result["scaling"]}
    expected = {gpus: plan_recipe(f"gpt2-124m {gpus}xH100").hours for gpus in times}
    assert times == pytest.approx(expected)
    assert result["hours"] > times[32]


def test_the_vocabulary_is_that_of_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)  # where the data of the shipped recipe are not
    (tmp_path / "manifest.json").write_text('{"tokenizer": {"vocab_size": 300}}')
    sizes = {"seed=1": 4096, f"data.path={tmp_path}": 300, "model.vocab_size=512": 512}
    assert {word: read_config("quickstart", word).model.vocab_size for word in sizes} == sizes


def test_json_of_the_command(ask: Ask):
    options = "--tokens chinchilla --price 2 --budget 500 --deadline 2d12h"
    result = ask(f"plan gpt3-1.3b --gpus 8xA100-40GB {options}")
    assert result["tokens"] == 20 * count_parameters(PRESETS["gpt3-1.3b"])
    assert result["dollars"] == pytest.approx(result["gpu_hours"] * 2)
    rate = result["tokens_per_second"]
    assert result["tokens_per_second_low"] < rate < result["tokens_per_second_high"]
    gpus, hours = (result["deadline"][key] for key in ("gpus", "hours"))
    fewer = plan_recipe(f"gpt3-1.3b {gpus // 2}xA100-40GB", tokens=result["tokens"])
    assert hours <= 60 < fewer.hours
    assert {row["gpus"] for row in result["scaling"]} >= {1, 8, 128}
    for name, (row,) in result["family"].items():
        assert row["tokens"] == 20 * count_parameters(PRESETS[name])
    spent = 6 * result["budget"]["parameters"] * result["budget"]["tokens"]
    assert spent == pytest.approx(500 / 2 * 3600 * 312e12 * result["mfu"], rel=0.15)


def test_a_family_on_several_gpu_counts_at_fixed_tokens_and_two_prices(ask: Ask):
    result = ask("plan gpt3-1.3b --gpus 8,128xA100-40GB --tokens 1e9 --price 1.5,5")
    assert {row["tokens"] for rows in result["family"].values() for row in rows} == {1e9}
    few, many = result["family"]["gpt3-1.3b"]
    assert (few["gpus"], many["gpus"]) == (8, 128)
    assert few["dollars"] == pytest.approx(1.5 * few["gpu_hours"])
    plan = plan_recipe("gpt3-1.3b 8xA100-40GB", prices=[1.5, 5.0])
    assert plan.dollars == [1.5 * plan.gpu_hours, 5 * plan.gpu_hours]


LADDERS = read_table("""
H100 fp32, TF32 alone, bf16, flash attention, compile, fused AdamW, TF32 on top
T4 fp32, fp16, compile, flash attention, padded vocabulary, fused AdamW
L4 fp32, TF32 alone, bf16, flash attention, compile, fused AdamW
V100-32GB fp32, fp16, compile, flash attention, fused AdamW
P100 fp32, flash attention, fused AdamW
""")


@pytest.mark.parametrize("gpu", LADDERS)
def test_the_ladder_has_what_the_card_has(gpu: str, ask: Ask):
    rows = ask(f"plan gpt2-124m --gpus {gpu} --ladder")["ladder"]
    ours = ["our fused kernels"] if "bf16" in LADDERS[gpu] else []
    expected = [*LADDERS[gpu].split(", "), *ours, "65,536 tokens per step", "8 GPUs"]
    assert [row["name"] for row in rows] == expected
    assert rows[-1]["speedup"] == rows[-1]["tokens_per_second"] / rows[0]["tokens_per_second"]


def test_explicit_attention_holds_the_scores():
    """Six bytes per score: the published bf16 rung takes 859 MiB more than FlashAttention's."""
    arguments = "shakespeare 1xH100 machine.precision=bf16 machine.fused=off machine.compile=off"
    explicit, flash = (
        plan_recipe(f"{arguments} machine.attention={name}").memory.total_bytes
        for name in ("explicit", "flash")
    )
    assert explicit - flash == 12 * 12 * 1024**2 * 6 == pytest.approx(859 * 2**20, rel=0.01)


def test_recipes_of_other_programs(ask: Ask):
    """llm.c's default batch grows with the processes."""
    flags = "-i a/train_*.bin -j a/val_*.bin -e d12 -b 4 -x 100"
    assert ask(f"plan --gpus 8xH100 --llmc '{flags}'")["tokens"] == 100 * 8 * 4 * 1024
    assert f"'--llmc={flags}'" in ask(f"launch slurm --nproc 2 --llmc '{flags}'")["script"]


def test_hours_are_left_out_if_the_length_is_that_of_unknown_files(ask: Ask):
    """The line of docs/coming-from.md: an epoch of shards that are not on this machine."""
    page = (Path(__file__).parents[2] / "docs/coming-from.md").read_text()
    (flags,) = re.findall(r"--llmc '(-i [^']*-h 1)'", page)
    result = ask(f"plan --gpus 8xA100-40GB --llmc {shlex.quote(flags)}")
    assert (result["tokens"], result["hours"], result["dollars"]) == (None, None, None)
    assert (result["fits"], result["sharding"], result["micro_batch"]) == (True, "zero1", 64)
    assert result["tokens_per_second"] > 1e6
    assert {row["hours"] for row in result["scaling"]} == {None}


def test_records_of_the_gpu_correct_the_speed(tmp_path: Path, ask: Ask):
    """A record of that GPU at 1.2 times the planned speed counts; records of other GPUs do not."""
    layout = Layout(micro_batch=16, micro_steps=2, program="fused")
    rate = 1.2 * estimate_step(PRESETS["gpt2-124m"], H100, layout).tokens_per_second
    row = {"micro_batch": 16, "batch_tokens": 32 * 1024, "tokens_per_second": {"median": rate}}
    sizes = {name: getattr(PRESETS["gpt2-124m"], name) for name in SIZES}
    rows = [{"program": "nanogpt"}, row]
    result = sizes | {"preset": "gpt2-124m", "precision": "bf16", "rows": rows}

    def plan(gpus):
        """Return a speed, and its ratio to the speed without records."""
        record = {"hardware": {"device": H100.driver}, "answer": result}
        (tmp_path / "sustained.json").write_text(json.dumps(record))
        planned = ask(f"plan gpt2-355m --records {tmp_path} --gpus {gpus}")
        rate = planned["tokens_per_second"]
        usual = plan_recipe(f"gpt2-355m {gpus}").tokens_per_second
        return rate / usual, planned["tokens_per_second_low"] / rate

    assert plan("8xH100") == pytest.approx((1.2, 0.9), rel=1e-6)
    assert plan("8xA100-40GB")[0] == 1
    result["rows"] = []
    assert plan("8xH100")[0] == pytest.approx(1)


def test_fine_tuning_is_planned_with_the_sizes_of_its_start_and_the_rows_of_its_data(
    tmp_path: Path, call: Call
):
    run, data, rows = tmp_path / "run", tmp_path / "data", tmp_path / "rows.jsonl"
    save_run(run, draw_model())
    write_jsonl(rows, [{"prompt": f"{n}", "completion": "b"} for n in range(400)])
    call(f"prepare {rows} --out {data} --val-fraction 0.1 --tokenizer bytes --context 24")
    plan = f"plan sft --gpus 1xA100-80GB --json model.init={run} data.path={data}"
    _, result, printed = call(f"{plan} budget.batch_tokens=240")
    n_rows = load_dataset(data).manifest.tokens("train") // 25
    assert json.loads(result.splitlines()[-1])["tokens"] == 3 * 24 * n_rows
    assert f"{count_parameters(replace(TINY_GPT, vocab_size=259)):,} parameters" in printed


def test_published_rates_are_those_of_that_card_and_model(ask: Ask):
    for run in ("gpt2-355m --gpus H100", "gpt2-124m --gpus H200"):
        assert ask(f"plan {run} --ladder")["ladder"][0]["published"] is None
