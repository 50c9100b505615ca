"""bench knob, bench peers: workers are processes on the same ids; one that fails is named and the others go on."""

import json
import math
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from megatoken.bench import runner
from megatoken.bench.baselines import BASELINES, OPTIM, build_baseline, build_ours, load_definitions
from megatoken.bench.compare import apply_setting, read_values, summarize
from megatoken.bench.runner import COMMAND, Worker, measure_workers
from megatoken.bench.spec import OURS, WorkerSpec
from megatoken.bench.workload import draw_ids
from megatoken.cli.main import main
from megatoken.config.model_config import ModelConfig
from megatoken.config.schema import MachineConfig
from megatoken.console import Console
from megatoken.errors import ExitCode, MegatokenError
from megatoken.system import environment
from megatoken.system.device import open_device
from tests.tiny_model import CPU

QUIET = Console(quiet=True)
TINY_GPT = ModelConfig(
    n_layer=1, n_head=2, d_model=32, d_ff=128, vocab_size=128, seq_len=16
)  # nothing to pad
GIVEN = {
    "--n-layer": 1,
    "--n-head": 2,
    "--d-model": 32,
    "--vocab-size": 128,
    "--seq-len": 16,
    "--batch-seqs": 4,
}
SIZES = [str(word) for pair in GIVEN.items() for word in pair]
HAVE = "have some of transformers, nanogpt, build-nanogpt, llmc: install it, or add "
HAVE += "--nanogpt, --build-nanogpt or --llmc PATH"
SPEC = WorkerSpec(name=OURS, model_config=TINY_GPT, batch_seqs=4, device="cpu")

# The interface of nanoGPT's model.py on a model without attention; what trains at its end must not run.
STAND_IN = """
import not_on_this_machine
from not_on_this_machine.either import something
import os
from dataclasses import dataclass
import torch
from torch import nn
from torch.nn import functional as F

@dataclass
class GPTConfig:
    block_size: int = 0
    vocab_size: int = 0
    n_layer: int = 0
    n_head: int = 0
    n_embd: int = 0
    dropout: float = 0.5
    bias: bool = False

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        assert (config.dropout, config.bias) == (0.0, True)
        print("number of parameters: many")
        self.table = nn.Embedding(config.vocab_size, config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size)
        nn.init.normal_(self.table.weight, std=0.02)
        BEGIN

    def forward(self, ids, targets=None):
        STEP
        scores = self.head(self.table(ids))
        return scores, F.cross_entropy(scores.view(-1, scores.size(-1)), targets.view(-1))

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        assert (weight_decay, learning_rate, betas, device_type) == (0.1, 6e-4, (0.9, 0.95), "cpu")
        return torch.optim.AdamW(self.parameters(), lr=learning_rate, betas=betas, weight_decay=weight_decay)

raise SystemExit("the file trains")
"""


def write_stand_in(path: Path, *, begin: str = "pass", step: str = "pass") -> Path:
    path.write_text(STAND_IN.replace("BEGIN", begin).replace("STEP", step))
    return path


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "MOST_STEPS", 3)


def test_ours_beside_transformers_and_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    write_stand_in(tmp_path / "model.py")
    words = [
        "bench",
        "peers",
        *SIZES,
        "--device",
        "cpu",
        "--repeats",
        "2",
        "--no-compile",
        "--out",
        str(tmp_path),
    ]
    assert (
        main([*words, "--only", "transformers,nanogpt", "--nanogpt", str(tmp_path)])
        == ExitCode.DONE
    )
    *table, last = capsys.readouterr().out.splitlines()
    answer = json.loads(last)
    assert json.loads((tmp_path / "peers.json").read_text())["answer"] == answer
    rows = {(row["name"], row["configuration"]): row for row in answer["rows"]}
    precisions = (
        ["fp32", "bf16"]
        if open_device(MachineConfig(device="cpu")).precision == "bf16"
        else ["fp32"]
    )
    names = [
        (name, f"{precision} eager")
        for precision in precisions
        for name in ("transformers", "nanogpt")
    ]
    assert set(rows) == {(OURS, "default"), *names}
    timed = answer["rows"]
    for row in timed:
        rate = row["tokens_per_second"]
        assert rate["repeats"] == (2 * len(names) if row is timed[0] else 2)
        assert 0 < rate["low"] <= rate["median"] <= rate["high"] <= row["best"]
        assert row["steps"] == timed[0]["steps"] == 2 + 2 * (1 + 3)
        assert row["peak_memory_bytes"] > 1e8
        assert row["first_step_seconds"] > 0
    # The same ids, rate and distribution of weights: the curves are one, but for the weights drawn.
    ours, theirs = rows[OURS, "default"], rows["transformers", "fp32 eager"]
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=0.02)
    best = max(row["tokens_per_second"]["median"] for row in timed[1:])
    assert (answer["ours"], answer["peer"]) == (ours["tokens_per_second"]["median"], best)
    assert answer["ratio"] == answer["ours"] / best == min(answer["ratios"].values())
    assert list(answer["ratios"]) == ["transformers", "nanogpt"]
    assert any(line.startswith("| transformers | fp32 eager") for line in table)


def test_a_worker_that_fails_is_named_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "_ADDED_VARIABLES", {"OWN_SETTING"})
    monkeypatch.setenv("OWN_SETTING", "123")
    assert "OWN_SETTING" not in environment.given_environment()
    failing = "raise ValueError(f'no room {os.environ.get(\"OWN_SETTING\")}\\nmore')"
    raising = write_stand_in(tmp_path / "raising.py", begin=failing)
    leaving = write_stand_in(tmp_path / "leaving.py", step="self.training and os._exit(3)")
    whole = write_stand_in(tmp_path / "whole.py")
    specs = [
        replace(SPEC, name="nanogpt", source=str(path)) for path in (raising, leaving, whole, whole)
    ]
    workers = measure_workers([SPEC, *specs], 2, QUIET)
    assert [worker.spec.name for worker in workers] == [OURS, *["nanogpt"] * 4]
    assert [worker.skipped for worker in workers] == [
        "",
        "ValueError: no room None",
        "its process ended with code 3: number of parameters: many",
        "",
        "",
    ]
    ours, last = workers[0], workers[-1]
    assert (len(ours.seconds), len(last.seconds)) == (4, 2), "ours runs beside each"
    ratios = [
        reference / seconds
        for reference, seconds in zip(ours.seconds[2:], last.seconds, strict=True)
    ]
    assert last.ratios == ratios, "a worker is compared with the reference in its own rounds"
    assert ours.steps == last.steps, "losses are of as many steps"
    assert last.loss is not None
    assert 3.5 < last.loss < 4.9
    assert not any(worker.processes for worker in workers)


def test_nothing_outlives_the_bench() -> None:
    worker = Worker(spec=SPEC)
    assert worker.warm_up()
    (process,) = worker.processes
    process.kill()
    assert worker.run_round(1) is None
    assert worker.skipped == "its process was killed (out of memory?)"
    worker = Worker(spec=SPEC)
    assert worker.warm_up()
    (process,) = worker.processes
    assert process.poll() is None
    worker.close()
    assert process.poll() is not None
    # What a bench that was killed leaves to its workers: an end of input.
    done = subprocess.run(
        COMMAND, stdin=subprocess.DEVNULL, capture_output=True, timeout=250, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def make_worker(
    name: str, configuration: str, seconds: list[float], ratios: list[float], skipped: str = ""
) -> Worker:
    spec = replace(SPEC, name=name, configuration=configuration)
    return Worker(
        spec=spec, seconds=seconds, ratios=ratios, loss=4.0, steps=5, chosen="fp32", skipped=skipped
    )


def test_ratios_of_given_numbers() -> None:
    ours = make_worker(OURS, "default", [0.5, 0.25, 0.5], [])
    slow = make_worker("a", "fp32 eager", [2.0, 2.0, 2.0], [0.25, 0.125, 0.25])
    fast = make_worker("a", "bf16 compile", [1.0, 0.25, 1.5], [0.5, 1.0, 1 / 3])
    other = make_worker("b", "fp32 eager", [4.0, 4.0, 4.0], [0.125, 0.0625, 0.125])
    dead = make_worker("c", "fp32 eager", [0.01], [50.0], skipped="died")
    answer = summarize([ours, slow, fast, other, dead], CPU)
    assert (answer["ours"], answer["peer"], answer["ratio"]) == (128.0, 64.0, 2.0)
    assert answer["best_peer"] == {"name": "a", "configuration": "bf16 compile"}
    assert answer["ratios"] == {"a": 2.0, "b": 8.0}
    assert answer["ratio_spread"] == {
        "median": 2.0,
        "low": 1.0,
        "high": pytest.approx(3.0),
        "repeats": 3,
    }
    rows = answer["rows"]
    assert rows[0]["tokens_per_second"] == {
        "median": 128.0,
        "low": 128.0,
        "high": 256.0,
        "repeats": 3,
    }
    assert (rows[0]["best"], rows[0]["loss"], rows[0]["steps"], rows[0]["skipped"]) == (
        256.0,
        4.0,
        5,
        None,
    )
    assert (rows[4]["tokens_per_second"], rows[4]["best"], rows[4]["skipped"]) == (
        None,
        None,
        "died",
    )
    alone = summarize([ours], CPU)
    assert (alone["ours"], alone["peer"], alone["ratio"], alone["ratios"]) == (
        128.0,
        None,
        None,
        {},
    )


def first_batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids = draw_ids(4, 17, TINY_GPT.vocab_size, seed=0)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def test_the_loss_of_transformers_is_of_the_next_ids() -> None:
    pytest.importorskip("transformers")
    spec = replace(SPEC, name="transformers")
    model, optimizer, compute_loss = BASELINES["transformers"](spec, torch.device("cpu"))
    inputs, targets = first_batch()
    scores = model(inputs).logits
    expected = F.cross_entropy(scores.flatten(0, 1), targets.flatten())
    assert compute_loss(model, inputs, targets).item() == pytest.approx(expected.item(), abs=1e-5)
    assert scores.shape == (4, 16, 128)
    decayed = [sum(p.dim() < 2 for p in group["params"]) for group in optimizer.param_groups]
    assert (decayed[0], optimizer.param_groups[0]["weight_decay"]) == (0, OPTIM.weight_decay)


def test_a_baseline_takes_the_same_step_as_ours() -> None:
    pytest.importorskip("transformers")
    spec = replace(SPEC, name="transformers")
    ours, baseline, again = build_ours(SPEC), *(build_baseline(spec) for _ in range(2))
    first = [training.run(1)["loss"] for training in (ours, baseline, again)]
    last = [training.run(9)["loss"] for training in (ours, baseline)]
    assert first == pytest.approx([math.log(128)] * 3, rel=0.02)
    assert first[1] == first[2], "ids and weights come from seeds"
    assert last[0] < first[0] - 0.03, "ten steps teach something"
    assert last[0] == pytest.approx(last[1], rel=0.01)


def test_only_definitions_of_a_file_run(tmp_path: Path) -> None:
    module = load_definitions(write_stand_in(tmp_path / "train_gpt2.py"))
    assert module.GPTConfig(n_layer=3).n_layer == 3
    assert module.os is os
    assert not hasattr(module, "something")
    assert [path.name for path in tmp_path.iterdir()] == ["train_gpt2.py"], (
        "nothing is left beside the file"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--n-head", "7"],
            "7 heads do not divide d_model 768 — --n-head — choose a divisor of 768",
        ),
        (["--only", "nanogtp"], f"there is no 'nanogtp' to measure — --only — {HAVE}"),
        (["--only", "nanogpt"], f"there is no 'nanogpt' to measure — --only — {HAVE}"),
        (
            ["--nanogpt", "/nowhere"],
            "no such file of nanogpt — /nowhere — give a checkout or its model.py",
        ),
    ],
)
def test_what_cannot_be_measured_is_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "peers", *words]) == ExitCode.CONFIG
    assert capsys.readouterr().err == f"error: {message}\n"


def test_ours_must_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (worker,) = measure_workers([replace(SPEC, device="nowhere")], 1, QUIET)
    assert worker.skipped.startswith("ConfigError: unknown device 'nowhere'")
    monkeypatch.setattr("megatoken.bench.compare.measure_workers", lambda *arguments: [worker])
    words = ["bench", "peers", *SIZES, "--device", "cpu", "--only", "transformers", "--no-compile"]
    assert main([*words, "--out", str(tmp_path / "out")]) == ExitCode.PEER
    assert "our own worker failed: ConfigError: unknown device" in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir()), "nothing was written to it"


def test_values_are_measured_beside_each_other(
    precision: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "bench",
        "knob",
        "activation_checkpointing",
        *SIZES,
        "--device",
        "cpu",
        "--repeats",
        "2",
        "--out",
        str(tmp_path),
    ]
    assert main([*words, "--name", "again", "--json"]) == 0
    printed = capsys.readouterr()
    answer = json.loads(printed.out)
    assert answer["precision"] == precision
    assert [row["value"] for row in answer["rows"]] == ["none", "gelu", "block"]
    losses = [row["loss"] for row in answer["rows"]]
    assert losses == [losses[0]] * 3
    for row in answer["rows"]:
        assert row["skipped"] is None
        assert row["chosen"].startswith(precision)
        assert row["tokens_per_second"]["repeats"] == (4 if row is answer["rows"][0] else 2), (
            "the first runs beside each"
        )
        assert row["gain"] == pytest.approx(answer["rows"][0]["seconds"] / row["seconds"])
        assert row["first_step_seconds"] > 0
    assert (
        json.loads((tmp_path / "again.json").read_text())["answer"]["knob"]
        == "activation_checkpointing"
    )
    assert "| block " in printed.err


def test_a_value_that_cannot_run_does_not_end_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    precision = open_device(MachineConfig(device="cpu")).precision
    words = [
        "bench",
        "knob",
        "attention",
        *SIZES,
        "--device",
        "cpu",
        "--repeats",
        "1",
        "--out",
        str(tmp_path),
    ]
    assert main([*words, "--values", "cudnn,flash,blocked", "--json"]) == 0
    cudnn, flash, blocked = json.loads(capsys.readouterr().out)["rows"]
    assert cudnn["skipped"].startswith(
        f"ConfigError: no cudnn attention for heads of 16 in {precision} on"
    )
    assert cudnn["tokens_per_second"] is cudnn["gain"] is None
    assert flash["tokens_per_second"]
    assert blocked["loss"] == pytest.approx(flash["loss"], rel=0.01)
    assert (tmp_path / "knob-attention.json").is_file()
    assert main([*words, "--values", "cudnn"]) == ExitCode.PEER
    assert "no value ran: ConfigError: no cudnn attention" in capsys.readouterr().err


def test_values_are_those_of_the_config() -> None:
    compile_values = ("auto", "off", "on", "blocks", "graphs")
    assert read_values("compile", "") == ("compile", {value: value for value in compile_values})
    assert read_values("loss_chunk", "0,512,512") == ("loss_chunk", {"0": 0, "512": 512})
    assert read_values("tf32", "on,off") == ("tf32", {"on": True, "off": False})
    assert apply_setting(SPEC, "fused", "off").machine == {"fused": "off"}
    assert apply_setting(SPEC, "micro_batch", 2).micro_batch == 2
    assert apply_setting(SPEC, "micro_batch", "auto").micro_batch == 0


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        (
            "speed",
            "",
            "no machine setting 'speed' to time — bench knob — give one of precision, tf32",
        ),
        ("device", "", "no machine setting 'device'"),
        ("shard", "", "no machine setting 'shard' to time"),
        ("loss_chunk", "", "machine.loss_chunk has no list of values — --values"),
        ("compile", "fast", "got 'fast' — --values"),
    ],
)
def test_wrong_settings_are_named(name: str, values: str, message: str) -> None:
    with pytest.raises(MegatokenError) as caught:
        read_values(name, values)
    assert message in str(caught.value)
    assert caught.value.code == ExitCode.CONFIG
