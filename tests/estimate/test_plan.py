"""`megatoken plan`: fit, speed, cost, tables, and what it refuses."""

import json
import math
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from megatoken.cli.arguments import parse
from megatoken.cli.main import main
from megatoken.cli.recipe import find_model
from megatoken.config.load import load_config
from megatoken.config.model_config import ModelConfig
from megatoken.config.presets import PRESETS
from megatoken.config.schema import Config
from megatoken.data.dataset import load_dataset
from megatoken.errors import ExitCode
from megatoken.estimate.compute_optimal import fitted_loss, split_compute
from megatoken.estimate.plan import (
    Plan,
    count_evaluated_tokens,
    find_deadline,
    plan_run,
    scale_gpus,
)
from megatoken.estimate.speed import Layout, estimate_step
from megatoken.model.flops import count_parameters, flops_per_token
from megatoken.system.gpus import GPUS
from tests.conftest import Ask
from tests.convert.models import TINY_GPT, draw_model, save_run

A100, H100 = GPUS["A100-40GB"], GPUS["H100"]


def read_model(name: str, *overrides: str) -> tuple[Config, ModelConfig]:
    resolved, model, _ = find_model(parse(["describe", name, *overrides]))
    return resolved.config, model


def plan_recipe(name: str, gpu: str, gpus: int, *overrides: str, **options: float) -> Plan:
    config, model = read_model(name, *overrides)
    return plan_run(config, model, GPUS[gpu], gpus, **options)


def test_published_run_of_llm_c():
    """GPT-2 124M on 10B tokens: 1 h 47 min, about $20 on eight A100s of 40 GB."""
    plan = plan_recipe("gpt2-124m", "A100-40GB", 8)
    assert plan.fits
    assert plan.hours == pytest.approx(107 / 60, rel=0.1)
    assert plan.dollars == [pytest.approx(20, rel=0.1)]
    assert plan.gpu_hours == plan.hours * 8
    assert plan.energy_kwh == pytest.approx(plan.gpu_hours * 0.4)
    flops = plan.tokens_per_second * flops_per_token(plan.model, causal=False)
    assert plan.mfu == pytest.approx(flops / (8 * 312e12))


def test_published_runs_fit():
    assert plan_recipe(
        "gpt2-1558m", "H100", 8, "machine.micro_batch=16", "machine.sharding=none"
    ).fits
    assert plan_recipe(
        "gpt2-124m", "A100-40GB", 8, "machine.micro_batch=64", "machine.sharding=zero1"
    ).fits
    assert plan_recipe("gpt3-1.3b", "A100-40GB", 8).fits


def test_what_makes_it_fit():
    """7B on 24 GB takes all shards and recomputation, on 16 cards; 175B nothing makes fit."""
    plan = plan_recipe("gpt3-6.7b", "RTX-4090", 16, tokens=1e9)
    assert plan.fits
    assert plan.layout.sharding == "zero3"
    assert not plan_recipe("gpt3-175b", "A100-40GB", 8, tokens=1e9).fits
    pinned = plan_recipe("gpt2-124m", "T4", 1, "machine.micro_batch=512")
    assert (pinned.fits, pinned.layout.micro_batch, pinned.layout.precision) == (False, 512, "fp16")


@pytest.mark.parametrize(
    ("name", "gpus"), [("gpt2-124m", 128), ("gpt3-125m", 256), ("gpt2-355m", 256)]
)
def test_nothing_is_recomputed_that_fits(name: str, gpus: int):
    """The whole batch fits at once: a second forward makes no room, though its time would hide communication."""
    layout = plan_recipe(name, "H100", gpus).layout
    assert (layout.micro_steps, layout.checkpointing) == (1, "none")


def test_recomputation_that_was_chosen_is_named_or_refused(ask: Ask):
    setting = "machine.activation_checkpointing"
    expected = [
        ("", "gelu", [f"{setting}=gelu"]),
        (f"{setting}=none", "none", []),
        (f"{setting}=gelu", "gelu", []),
    ]
    for given, chosen, settings in expected:
        answer = ask(f"plan gpt2-1558m --gpus 8xRTX-4090 {given}")
        sharding = f"machine.sharding={answer['sharding']}"
        assert (answer["checkpointing"], answer["settings"]) == (chosen, [sharding, *settings])
    assert ask("plan gpt2-124m --gpus 128xH100")["settings"] == ["machine.sharding=zero2"]


def test_what_does_not_fit_has_no_price(ask: Ask):
    answer = ask("plan gpt3-175b --gpus 8xH100")
    assert [answer[key] for key in ("hours", "gpu_hours", "dollars", "energy_kwh")] == [None] * 4
    assert answer["fewest_gpus"] == 48
    assert plan_recipe("gpt3-175b", "H100", 48).fits
    assert not plan_recipe("gpt3-175b", "H100", 32).fits  # the next divisor of 1,536 sequences
    assert plan_recipe("gpt3-175b", "H100", 1024).fits
    assert ask("plan gpt2-124m --gpus 1xT4 machine.micro_batch=512")["fewest_gpus"] is None


def test_a_price_that_nobody_knows(ask: Ask):
    assert ask("plan gpt2-124m --gpus 1xT4")["dollars"] is None


def test_strong_scaling():
    config, model = read_model("gpt2-124m")
    plans = scale_gpus(config, model, A100, (1, 8, 64, 3, 1024))
    assert [plan.layout.gpus for plan in plans] == [
        1,
        8,
        64,
    ]  # 512 sequences divide neither by 3 nor by 1,024
    rates = [plan.tokens_per_second for plan in plans]
    assert rates[0] < rates[1] < rates[2] < 64 * rates[0]
    for plan in plans:
        assert (
            plan.layout.gpus * plan.layout.micro_batch * plan.layout.micro_steps
            == config.batch_seqs
        )
        assert plan.step.tokens == config.budget.batch_tokens


def test_muon_adds_its_products_to_the_optimizer():
    """1.63e12 FLOP at 62% of 989e12 a second, shared by the GPUs."""
    model, seconds = PRESETS["gpt2-124m"], {}
    for gpus in (1, 8):
        adamw, muon = (
            estimate_step(model, H100, Layout(gpus=gpus, optimizer=name))
            for name in ("adamw", "muon")
        )
        seconds[gpus] = muon.optimizer - adamw.optimizer
    assert seconds[1] == pytest.approx(2.66e-3, rel=0.01)
    assert seconds[8] == pytest.approx(seconds[1] / 8)


@pytest.mark.parametrize(
    ("gpu", "given", "precision", "program"),
    [
        ("T4", "fp32", "fp32", "compiled"),  # no TF32 before Ampere
        ("V100-32GB", "fp32", "fp32", "compiled"),
        ("T4", "bf16", "bf16", "compiled"),  # emulated
        ("RTX-3090", "fp32", "tf32", "compiled"),
        ("P100", "auto", "fp32", "eager"),
        ("GTX-1080Ti", "auto", "fp32", "eager"),
    ],
)
def test_products_in_a_precision_that_the_card_lacks_are_fp32(
    gpu: str, given: str, precision: str, program: str
):
    words = ("machine.micro_batch=1", f"machine.precision={given}")
    plan = plan_recipe("shakespeare", gpu, 1, *words)
    assert (plan.layout.precision, plan.layout.program) == (precision, program)
    plain = estimate_step(plan.model, plan.gpu, replace(plan.layout, precision="fp32"))
    assert (plan.step.products == plain.products) == (precision != "tf32")


@pytest.mark.parametrize(
    ("adamw", "counted"), [("auto", "fused"), ("loop", "foreach"), ("foreach", "foreach")]
)
def test_the_form_of_adamw_counts(adamw: str, counted: str):
    """As the published runs without and with the fused kernel, 55,271 and 78,750 tokens/s."""
    plan = plan_recipe("shakespeare", "H100", 1, f"machine.adamw={adamw}")
    assert plan.step == estimate_step(plan.model, H100, Layout(program="fused", adamw=counted))


def test_deadline_is_the_fewest_gpus():
    config, model = read_model("gpt2-124m")
    plan = find_deadline(config, model, A100, 2.0)
    assert plan is not None
    assert plan.hours <= 2.0
    fewer = plan_run(config, model, A100, plan.layout.gpus // 2)
    assert fewer.hours > 2.0
    assert find_deadline(config, model, A100, 0.01) is None


def test_compute_optimal_split():
    """Chinchilla: 5.76e23 FLOP are 67B parameters and 1.5T tokens by the first approach; 40B by the third."""
    parameters, tokens = split_compute(5.76e23, "chinchilla")
    assert tokens == pytest.approx(20 * parameters)
    assert 6 * parameters * tokens == pytest.approx(5.76e23)
    assert parameters == pytest.approx(69.3e9, rel=0.01)
    fitted, fitted_tokens = split_compute(5.76e23, "fitted")
    best = fitted_loss(fitted, fitted_tokens)
    for factor in (0.9, 1.1):
        assert fitted_loss(fitted * factor, fitted_tokens / factor) > best
    assert math.isclose(6 * fitted * fitted_tokens, 5.76e23)


def test_a_budget_is_planned_at_the_speed_of_a_model_that_fits(ask: Ask):
    budget = ask("plan gpt3-125m --gpus 1xRTX-3090 --budget 1e6")["budget"]
    assert (budget["nearest"], budget["fitting"]) == ("gpt3-175b", "gpt3-760m")
    fitting = plan_recipe("gpt3-760m", "RTX-3090", 1, "budget.batch_start=0", "budget.batch_ramp=0")
    rate = fitting.tokens_per_second * 1e6 / GPUS["RTX-3090"].price * 3600
    assert budget["flops"] == pytest.approx(6 * count_parameters(fitting.model) * rate, rel=0.1)
    assert 6 * budget["parameters"] * budget["tokens"] == pytest.approx(budget["flops"])
    words = "plan gpt3-125m --gpus 1xT4 --price 1 --budget 5 machine.micro_batch=256"
    assert main(words.split()) == ExitCode.CONFIG


@pytest.mark.parametrize(("every", "evaluations"), [("30steps", 5), ("0.5dur", 3), ("0", 1)])
def test_evaluations_before_the_first_step_and_at_the_end_are_counted(every: str, evaluations: int):
    words = (
        "budget.steps=100",
        "budget.batch_tokens=512",
        f"evaluate.every={every}",
        "evaluate.tokens=1000",
    )
    assert count_evaluated_tokens(load_config("quickstart", *words), 51_200) == 1000 * evaluations


def test_a_batch_that_grows_takes_longer(ask: Ask):
    """Half of the tokens in batches of 128 sequences, half in 256, on 16 GPUs; a first batch is made to divide."""
    common = ("budget.tokens=1e9", "evaluate.every=0", "machine.sharding=zero1")
    whole = plan_recipe("gpt2-124m", "H100", 16, *common, "budget.batch_tokens=262144")
    half = plan_recipe("gpt2-124m", "H100", 16, *common, "budget.batch_tokens=131072")
    grown = ("budget.batch_tokens=262144", "budget.batch_start=131072", "budget.batch_ramp=500e6")
    plan = plan_recipe("gpt2-124m", "H100", 16, *common, *grown)
    assert plan.tokens_per_second == whole.tokens_per_second
    assert (whole.layout.micro_batch, half.layout.micro_batch) == (16, 8)
    assert half.hours > 1.1 * whole.hours
    assert plan.hours == pytest.approx((whole.hours + half.hours) / 2, rel=0.01)
    ramp = "budget.batch_start=16384 budget.batch_ramp=500e6"
    answer = ask(f"plan gpt2-124m --gpus 32xH100 {ramp}")
    assert "budget.batch_start=32768" in answer["settings"]
    times = {row["gpus"]: row["hours"] for row in answer["scaling"]}
    expected = {gpus: plan_recipe("gpt2-124m", "H100", gpus).hours for gpus in times}
    assert times == pytest.approx(expected)
    assert answer["hours"] > times[32]


def test_the_vocabulary_is_that_of_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert (
        read_model("quickstart")[1].vocab_size == 4096
    )  # as the shipped recipe's data are prepared
    (tmp_path / "manifest.json").write_text('{"tokenizer": {"vocab_size": 300}}')
    assert read_model("quickstart", f"data.path={tmp_path}")[1].vocab_size == 300
    assert read_model("quickstart", "model.vocab_size=512")[1].vocab_size == 512


def test_json_of_the_command(ask: Ask):
    options = "--tokens chinchilla --price 2 --budget 500 --deadline 2d12h"
    answer = ask(f"plan gpt3-1.3b --gpus 8xA100-40GB {options}")
    assert answer["tokens"] == 20 * count_parameters(PRESETS["gpt3-1.3b"])
    assert answer["dollars"] == pytest.approx(answer["gpu_hours"] * 2)
    rate = answer["tokens_per_second"]
    assert answer["tokens_per_second_low"] < rate < answer["tokens_per_second_high"]
    assert answer["deadline"]["hours"] <= 60
    assert {row["gpus"] for row in answer["scaling"]} >= {1, 8, 128}
    assert {row["tokens"] for (row,) in answer["family"].values()} == {
        20 * count_parameters(model) for name, model in PRESETS.items() if name.startswith("gpt3-")
    }
    assert set(answer["family"]) == {name for name in PRESETS if name.startswith("gpt3-")}
    spent = 6 * answer["budget"]["parameters"] * answer["budget"]["tokens"]
    assert spent == pytest.approx(500 / 2 * 3600 * 312e12 * answer["mfu"], rel=0.15)


def test_a_family_on_several_gpu_counts_at_fixed_tokens_and_two_prices(ask: Ask):
    answer = ask("plan gpt3-1.3b --gpus 8,128xA100-40GB --tokens 1e9 --price 1.5,5")
    assert {row["tokens"] for rows in answer["family"].values() for row in rows} == {1e9}
    few, many = answer["family"]["gpt3-1.3b"]
    assert (few["gpus"], many["gpus"]) == (8, 128)
    assert few["dollars"] == pytest.approx(1.5 * few["gpu_hours"])
    plan = plan_recipe("gpt3-1.3b", "A100-40GB", 8, prices=[1.5, 5.0])
    assert plan.dollars == [1.5 * plan.gpu_hours, 5 * plan.gpu_hours]


@pytest.mark.parametrize(
    ("gpu", "names"),
    [
        ("H100", "fp32, TF32 alone, bf16, flash attention, compile, fused AdamW, TF32 on top"),
        ("T4", "fp32, fp16, compile, flash attention, padded vocabulary, fused AdamW"),
        ("L4", "fp32, TF32 alone, bf16, flash attention, compile, fused AdamW"),
        ("V100-32GB", "fp32, fp16, compile, flash attention, fused AdamW"),
        ("P100", "fp32, flash attention, fused AdamW"),
    ],
)
def test_the_ladder_has_what_the_card_has(gpu: str, names: str, ask: Ask):
    rows = ask(f"plan gpt2-124m --gpus {gpu} --ladder")["ladder"]
    ours = ["our fused kernels"] if "bf16" in names else []
    expected = [*names.split(", "), *ours, "65,536 tokens per step", "8 GPUs"]
    assert [row["name"] for row in rows] == expected
    assert rows[-1]["speedup"] == rows[-1]["tokens_per_second"] / rows[0]["tokens_per_second"]


def test_the_ladder_is_next_to_published_rows_of_that_card_and_model(tmp_path: Path, ask: Ask):
    pytest.importorskip("matplotlib")
    rows = ask(f"plan gpt2-124m --gpus H100 --ladder --plot {tmp_path}/ladder.png")["ladder"]
    published = {row["name"]: row["published"] for row in rows}
    assert (published["fp32"], published["8 GPUs"]) == (27026, 3046409)
    assert published["our fused kernels"] is None
    assert (tmp_path / "ladder.png").read_bytes().startswith(b"\x89PNG")
    for words in ("gpt2-355m --gpus H100", "gpt2-124m --gpus H200"):
        assert not any(row["published"] for row in ask(f"plan {words} --ladder")["ladder"])


def test_explicit_attention_holds_the_scores():
    """Six bytes each, by which the published bf16 rung exceeds FlashAttention's, 859 MiB."""
    words = ("machine.precision=bf16", "machine.fused=off", "machine.compile=off")
    explicit, flash = (
        plan_recipe("shakespeare", "H100", 1, *words, f"machine.attention={name}").memory
        for name in ("explicit", "flash")
    )
    excess = explicit.total_bytes - flash.total_bytes
    assert excess == 12 * 12 * 1024**2 * 6 == pytest.approx(859 * 2**20, rel=0.01)


def test_list_of_gpus(ask: Ask):
    rows = {row["name"]: row for row in ask("plan --gpus list")["gpus"]}
    assert set(rows) == set(GPUS)
    assert rows["T4"]["peaks"] == {"fp32": 8.1e12, "fp16": 65e12}
    assert rows["H100"]["memory_rate"] == 3.35e12


def test_recipes_of_other_programs(ask: Ask):
    """llm.c's default batch grows with the processes."""
    flags = "-i a/train_*.bin -j a/val_*.bin -e d12 -b 4 -x 100"
    answer = ask(f"plan --gpus 8xH100 --llmc '{flags}'")
    assert answer["tokens"] == 100 * 8 * 4 * 1024
    script = ask(f"launch slurm --nproc 2 --llmc '{flags}'")["script"]
    assert f"'--llmc={flags}'" in script


def test_hours_are_left_out_if_the_length_is_that_of_unknown_files(ask: Ask):
    """The line of docs/coming-from.md: an epoch of shards that are not on this machine."""
    page = (Path(__file__).parents[2] / "docs" / "coming-from.md").read_text()
    (flags,) = re.findall(r"--llmc '(-i [^']*-h 1)'", page)
    answer = ask(f"plan --gpus 8xA100-40GB --llmc {shlex.quote(flags)}")
    assert (answer["tokens"], answer["hours"], answer["dollars"]) == (None, None, None)
    assert (answer["fits"], answer["sharding"], answer["micro_batch"]) == (True, "zero1", 64)
    assert answer["tokens_per_second"] > 1e6
    assert {row["hours"] for row in answer["scaling"]} == {None}


def test_an_output_has_one_speedup_and_one_time(capsys: pytest.CaptureFixture[str]):
    """The family's rows are relative to one GPU, as the run's. The head adds the ramp's time."""
    words = "plan gpt3-1.3b --gpus 128xA100-40GB --tokens 1e9"
    assert main(words.split()) == ExitCode.DONE
    printed = capsys.readouterr().out
    rate = f"{plan_recipe('gpt3-1.3b', 'A100-40GB', 128).tokens_per_second:,.0f}"
    rows = re.findall(rf" 128 +([\d.]+) +{rate} +[\d.]+% +(\w+) ", printed)
    assert len(rows) == 2
    assert len(set(rows)) == 1
    assert f"{rows[0][1]}, with the batch ramp" in printed


@pytest.mark.parametrize(
    "words",
    [
        "gpt2-124m",
        "gpt2-124m --gpus 8xA10000",
        "gpt2-124m --gpus 7xH100",
        "gpt2-124m --gpus 8xH100 --price nan",
        "gpt2-124m --gpus 8xH100 --budget 0.01",
        "gpt2-124m --gpus 8xH100 --law fitted --budget 1e-9",
        "gpt2-124m --gpus 8xT4 --budget 5",
        "gpt2-124m --gpus 8xH100 --deadline 5",
        "gpt2-124m --gpus 8xH100 --tokens 0",
        "gpt2-124m --gpus 8xH100 budget.epochs=1 --deadline 1h",
        "--gpus 8xH100 --budget 5000",
        "gpt3-175b --gpus 1000xH100",
    ],
)
def test_refused_commands(words: str, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", *words.split()]) == ExitCode.CONFIG
    assert capsys.readouterr().err.count("\n") == 1


def test_records_of_the_gpu_correct_the_speed(tmp_path: Path, ask: Ask):
    """1.2 times the planned speed, by a record of that GPU; those of others say nothing."""
    layout = Layout(micro_batch=16, micro_steps=2)
    rate = 1.2 * estimate_step(PRESETS["gpt2-124m"], H100, layout).tokens_per_second
    row = {"micro_batch": 16, "batch_tokens": 32 * 1024, "tokens_per_second": {"median": rate}}
    answer = {"preset": "gpt2-124m", "seq_len": 1024, "precision": "bf16", "rows": [row]}
    record = {"hardware": {"device": H100.driver}, "answer": answer}
    (tmp_path / "batch.json").write_text(json.dumps(record))

    def plan(gpus: str) -> dict[str, float]:
        return ask(f"plan gpt2-355m --records {tmp_path} --gpus {gpus}")

    known = plan("8xH100")
    assert known["tokens_per_second"] == pytest.approx(
        1.2 * plan_recipe("gpt2-355m", "H100", 8).tokens_per_second, rel=1e-6
    )
    assert known["tokens_per_second_low"] == pytest.approx(0.9 * known["tokens_per_second"])
    assert (
        plan("8xA100-40GB")["tokens_per_second"]
        == plan_recipe("gpt2-355m", "A100-40GB", 8).tokens_per_second
    )
    (tmp_path / "batch.json").write_text(json.dumps(record | {"answer": {"rows": []}}))
    assert plan("8xH100")["tokens_per_second"] == pytest.approx(known["tokens_per_second"] / 1.2)


def test_picture(tmp_path: Path, ask: Ask):
    pytest.importorskip("matplotlib")
    target = tmp_path / "plan.png"
    words = f"plan gpt2-124m --gpus 8xH100 --plot {tmp_path}/plan"
    assert ask(words)["picture"] == str(target)
    assert target.read_bytes().startswith(b"\x89PNG")
    assert main([*words.split(), f"--plot={tmp_path}/plan.foo"]) == ExitCode.CONFIG


def test_fine_tuning_is_planned_with_the_sizes_of_its_start_and_the_rows_of_its_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run, data, rows = tmp_path / "run", tmp_path / "data", tmp_path / "rows.jsonl"
    save_run(run, draw_model())
    rows.write_text("".join(f'{{"prompt": "{n}", "completion": "b"}}\n' for n in range(400)))
    words = f"prepare {rows} --out {data} --val-fraction 0.1 --tokenizer bytes --context 24"
    assert main(words.split()) == ExitCode.DONE
    capsys.readouterr()
    words = f"plan sft --gpus 1xA100-80GB --json model.init={run} data.path={data}"
    assert main([*words.split(), "budget.batch_tokens=240"]) == ExitCode.DONE
    printed = capsys.readouterr()
    n_rows = load_dataset(data).manifest.tokens("train") // 25
    assert json.loads(printed.out)["tokens"] == 3 * 24 * n_rows
    assert f"{count_parameters(replace(TINY_GPT, vocab_size=259)):,} parameters" in printed.err
