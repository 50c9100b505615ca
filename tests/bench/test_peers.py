"""bench peers: contenders really run as processes, on the same ids; who fails is named and the others go on."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from megatoken.bench import peers
from megatoken.bench.peers import Contender, Lost, Result, count_at_once, race, summarize
from megatoken.bench.rivals import OPTIM, PEERS, build_ours, load_definitions, run_peer
from megatoken.bench.spec import OURS, Spec
from megatoken.bench.workload import draw_ids
from megatoken.cli import main
from megatoken.console import Console
from megatoken.errors import Exit, Fault
from megatoken.hardware import given_environment
from megatoken.presets import PRESETS, Shape
from tests.tiny import CPU

SHAPE = Shape(n_layer=1, n_head=2, d_model=32, d_ff=128, vocab_size=128, seq_len=16)  # nothing to pad
GIVEN = {"--n-layer": 1, "--n-head": 2, "--d-model": 32, "--vocab-size": 128, "--seq-len": 16, "--batch-seqs": 4}
SIZES = [str(word) for pair in GIVEN.items() for word in pair]
OURS_HERE = Spec(name=OURS, shape=SHAPE, batch_seqs=4, device="cpu")

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
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "MOST_STEPS", 3)


def test_ours_beside_transformers_and_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    write_stand_in(tmp_path / "model.py")
    words = ["bench", "peers", *SIZES, "--device", "cpu", "--repeats", "2", "--no-compile", "--out", str(tmp_path)]
    assert main([*words, "--only", "transformers,nanogpt", "--nanogpt", str(tmp_path)]) == Exit.DONE
    *table, last = capsys.readouterr().out.splitlines()
    answer = json.loads(last)
    assert json.loads((tmp_path / "peers.json").read_text())["answer"] == answer
    rows = {(row["name"], row["configuration"]): row for row in answer["rows"]}
    names = [(name, f"{precision} eager") for precision in ("fp32", "bf16") for name in ("transformers", "nanogpt")]
    assert set(rows) == {(OURS, "default"), *names}
    timed = [row for row in answer["rows"] if not row["skipped"]]
    assert {(row["name"], row["configuration"]) for row in timed} >= {(OURS, "default"), names[0], names[1]}
    for row in timed:
        rate = row["tokens_per_second"]
        assert rate["repeats"] == 2
        assert 0 < rate["low"] <= rate["median"] <= rate["high"] == row["best"]
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
    assert any(line.startswith("transformers  fp32 eager") for line in table)


def test_who_fails_is_named_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "123")  # as our own preparation does, after the start
    assert "GOMP_SPINCOUNT" not in given_environment()
    said = "raise ValueError(f'no room {os.environ.get(\"GOMP_SPINCOUNT\")}\\nmore')"
    raising = write_stand_in(tmp_path / "raising.py", begin=said)
    leaving = write_stand_in(tmp_path / "leaving.py", step="self.training and os._exit(3)")
    whole = write_stand_in(tmp_path / "whole.py")
    specs = [replace(OURS_HERE, name="nanogpt", source=str(path)) for path in (raising, leaving, whole)]
    results = race(OURS_HERE, specs, 2, 2, 64, Console())
    assert [result.name for result in results] == [OURS, *["nanogpt"] * 3]
    assert [result.skipped for result in results] == [
        "",
        "ValueError: no room None",
        "its process ended with code 3: number of parameters: many",
        "",
    ]
    ours, last = results[0], results[-1]
    assert (len(ours.laps), len(last.laps)) == (4, 2), "ours runs in both heats"
    assert last.pace == ours.laps[2:], "a peer is compared with ours in its own rounds"
    assert ours.steps == last.steps, "losses are of as many steps"
    assert last.loss is not None
    assert 3.5 < last.loss < 4.9


def test_nothing_outlives_the_bench() -> None:
    with Contender(OURS_HERE) as contender:
        process = contender._process
        process.kill()
        with pytest.raises(Lost, match=r"its process was killed \(out of memory\?\)"):
            contender.warm_up()
    with Contender(OURS_HERE) as contender:
        assert contender._process.poll() is None
    assert contender._process.poll() is not None
    # What a bench that was killed leaves to its contenders: an end of input.
    alone = [sys.executable, "-m", "megatoken.bench.contender"]
    done = subprocess.run(alone, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_ratios_of_given_numbers() -> None:
    ours = Result(name=OURS, configuration="default", laps=[0.5, 0.25, 0.5], loss=4.0, steps=5, chosen="fp32")
    slow = Result(name="a", configuration="fp32 eager", laps=[2.0, 2.0, 2.0], pace=[0.5, 0.25, 0.5])
    fast = Result(name="a", configuration="bf16 compile", laps=[1.0, 0.25, 1.5], pace=[0.5, 0.25, 0.5])
    other = Result(name="b", configuration="fp32 eager", laps=[4.0, 4.0, 4.0], pace=[0.5, 0.25, 0.5])
    dead = Result(name="c", configuration="fp32 eager", laps=[0.01], pace=[0.5], skipped="died")
    answer = summarize([ours, slow, fast, other, dead], tokens=100)
    assert (answer["ours"], answer["peer"], answer["ratio"]) == (200.0, 100.0, 2.0)
    assert answer["best_peer"] == {"name": "a", "configuration": "bf16 compile"}
    assert answer["ratios"] == {"a": 2.0, "b": 8.0}
    assert answer["ratio_spread"] == {"median": 2.0, "low": 1.0, "high": 3.0, "repeats": 3}
    rows = answer["rows"]
    assert rows[0]["tokens_per_second"] == {"median": 200.0, "low": 200.0, "high": 400.0, "repeats": 3}
    assert (rows[0]["best"], rows[0]["loss"], rows[0]["steps"], rows[0]["skipped"]) == (400.0, 4.0, 5, None)
    assert (rows[4]["tokens_per_second"], rows[4]["best"], rows[4]["skipped"]) == (None, None, "died")


def test_without_a_peer_there_is_no_ratio() -> None:
    answer = summarize([Result(name=OURS, configuration="default", laps=[0.5])], tokens=10)
    assert (answer["ours"], answer["peer"], answer["ratio"], answer["ratios"]) == (20.0, None, None, {})


def first_batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids = draw_ids(4, 17, SHAPE.vocab_size, seed=0)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def test_the_loss_of_transformers_is_of_the_next_ids() -> None:
    pytest.importorskip("transformers")
    spec = replace(OURS_HERE, name="transformers")
    peer = PEERS["transformers"](spec, torch.device("cpu"))
    inputs, targets = first_batch()
    scores = peer.model(inputs).logits
    expected = F.cross_entropy(scores.flatten(0, 1), targets.flatten())
    assert peer.loss(peer.model, inputs, targets).item() == pytest.approx(expected.item(), abs=1e-5)
    assert scores.shape == (4, 16, 128)
    decayed = [sum(p.dim() < 2 for p in group["params"]) for group in peer.optimizer.param_groups]
    assert (decayed[0], peer.optimizer.param_groups[0]["weight_decay"]) == (0, OPTIM.weight_decay)


def test_a_peer_takes_the_same_step_as_ours() -> None:
    pytest.importorskip("transformers")
    spec = replace(OURS_HERE, name="transformers")
    ours, peer, again = build_ours(OURS_HERE), *(run_peer(spec, PEERS["transformers"]) for _ in range(2))
    first = [rival.turn(1)["loss"] for rival in (ours, peer, again)]
    last = [rival.turn(9)["loss"] for rival in (ours, peer)]
    assert first == pytest.approx([math.log(128)] * 3, rel=0.02)
    assert first[1] == first[2], "ids and weights come from seeds"
    assert last[0] < first[0] - 0.03, "ten steps teach something"
    assert last[0] == pytest.approx(last[1], rel=0.01)


def test_only_definitions_of_a_file_run(tmp_path: Path) -> None:
    module = load_definitions(write_stand_in(tmp_path / "train_gpt2.py"))
    assert module.GPTConfig(n_layer=3).n_layer == 3
    assert module.os is os
    assert not hasattr(module, "something")
    assert [path.name for path in tmp_path.iterdir()] == ["train_gpt2.py"], "nothing is left beside the file"


def test_as_many_at_once_as_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = PRESETS["gpt2-124m"]  # 4.2 GB each by the estimate
    for free, expected in ((0, 1), (8e9, 1), (13e9, 2), (60e9, 13)):
        monkeypatch.setattr(peers, "free_memory_bytes", lambda free=free: free)
        assert count_at_once(shape, 1024, CPU) == expected


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--n-head", "7"], "7 heads do not divide a width of 768 — --n-head — give a divisor of --d-model"),
        (
            ["--only", "nanogtp"],
            "unknown peer 'nanogtp' — --only — choose from transformers, litgpt, nanogpt, build-nanogpt",
        ),
        (["--only", "nanogpt"], "no checkout of nanogpt given — --only — add --nanogpt PATH"),
        (["--nanogpt", "/nowhere"], "no such file of nanogpt — /nowhere — give a checkout or its model.py"),
        (["--repeats", "0"], "0 repeats measure nothing — --repeats — give at least 1"),
    ],
)
def test_what_cannot_be_measured_is_said_at_once(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "peers", *words]) == Exit.CONFIG
    assert capsys.readouterr().err == f"error: {said}\n"


def test_ours_must_run() -> None:
    broken = replace(OURS_HERE, device="nowhere")
    with pytest.raises(Fault, match="our own contender failed: Fault: unknown device 'nowhere'") as caught:
        race(broken, [], 1, 1, 64, Console())
    assert caught.value.code == Exit.PEER
