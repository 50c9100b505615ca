"""`megatoken eval` as people meet it, and tasks scored while a run trains."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatoken.cli import main
from megatoken.console import Console
from megatoken.data.prepare import prepare
from megatoken.errors import Exit, Fault
from megatoken.pretrain import pretrain
from megatoken.recipe import resolve
from megatoken.train.journal import read_metrics
from tests.data.small_dataset import write_foreign

RECIPE = """\
model: {n_layer: 2, n_head: 2, d_model: 32, seq_len: 64}
data: {path: DATA}
optim: {lr: 1e-2, warmup: 5steps}
budget: {steps: 20, batch_tokens: 512}
machine: {device: cpu, precision: fp32, micro_batch: 4, threads: 1, linear: torch, attention: flash}
save: {every: 10steps}
evaluate:
  {every: 10steps, tokens: 100000, tasks: "hellaswag,lambada", tasks_every: 10steps, tasks_data: TASKS, tasks_limit: 30}
log: {plots: false}
"""
LINES = [f"{n} bottles of beer on the wall, take {n % 7} down" for n in range(400)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text, shards of it and examples from it."""
    folder = tmp_path_factory.mktemp("eval")
    (folder / "text.txt").write_text("<|endoftext|>".join(LINES))
    prepare(str(folder / "text.txt"), folder / "shards", tokenizer="bytes", val_fraction=0.1)
    prepare(str(folder / "text.txt"), folder / "other", tokenizer="bpe:300", val_fraction=0.0)
    write_foreign(folder / "foreign.bin", np.arange(200, dtype=np.uint16))
    (folder / "rows.jsonl").write_text('{"goal": "no text"}\n')
    tasks = folder / "tasks"
    tasks.mkdir()
    rows = [
        {
            "activity_label": "Beer",
            "ctx": f"{n} bottles of beer",
            "endings": [f" on the {thing}, take {n % k} down" for k, thing in ((7, "wall"), (5, "wall"), (3, "floor"))],
            "label": n % 3,
        }
        for n in range(40)
    ]
    (tasks / "hellaswag.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tasks / "lambada.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES[:40]))
    recipe = RECIPE.replace("DATA", str(folder / "shards")).replace("TASKS", str(tasks))
    (folder / "tiny.yaml").write_text(recipe)
    return folder


@pytest.fixture(scope="module")
def run(place: Path) -> Path:
    summary = pretrain(resolve(str(place / "tiny.yaml")), place / "run", Console(to_stderr=True))
    assert summary.code == Exit.DONE
    return place / "run"


def evaluate(*words: object, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["eval", *map(str, words), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert isinstance(answer, dict)
    return answer


def refuse(*words: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(["eval", *map(str, words)])
    said = capsys.readouterr().err.strip()
    assert "\n" not in said
    return code, said


def test_tasks_are_scored_while_training_and_afterwards_alike(
    run: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row for row in read_metrics(run) if row["kind"] == "eval"]
    assert [(row["step"], row["task"], row["n"]) for row in rows] == [
        (step, task, 30) for step in (0, 10, 20) for task in ("hellaswag", "lambada")
    ]
    answer = evaluate(run, "--tasks", "hellaswag,lambada", "--data", place / "tasks", "--limit", 30, capsys=capsys)
    for row in rows[-2:]:
        grades = answer["tasks"][row["task"]]
        assert grades.pop("seconds") > 0
        assert {key: row[key] for key in grades} == grades
    assert answer["model"] == f"{run} at step 20"


def test_a_table_for_people(run: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(run), "--tasks", "hellaswag,lambada", "--data", str(place / "tasks")]) == 0
    head, hellaswag, lambada = capsys.readouterr().out.splitlines()[-3:]
    assert head.split() == ["task", "n", "acc", "acc_norm", "acc_token_mean"]
    assert hellaswag.split()[:2] == ["hellaswag", "40"]
    assert hellaswag.count("±") == 3
    assert lambada.split()[5:8] == ["-", "-", "perplexity"]


def test_examples_come_in_the_files_order_and_make_up_the_scores(
    run: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [run, "--tasks", "hellaswag", "--data", place / "tasks" / "hellaswag.jsonl", "--examples"]
    grades = evaluate(*words, capsys=capsys)["tasks"]["hellaswag"]
    examples = grades["examples"]
    assert [example["gold"] for example in examples] == [n % 3 for n in range(40)]
    for score, choice in (("acc", "pred"), ("acc_norm", "pred_norm"), ("acc_token_mean", "pred_token_mean")):
        right = np.array([example[choice] == example["gold"] for example in examples], float)
        assert grades[score] == right.mean()
        assert grades["stderr"][score] == pytest.approx(right.std(ddof=1) / math.sqrt(40))
    less = evaluate(*words, "--no-token-mean", capsys=capsys)["tasks"]["hellaswag"]
    assert less["acc_token_mean"] is None
    assert [example["pred"] for example in less["examples"]] == [example["pred"] for example in examples]


def test_two_processes_say_what_one_says(run: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["--tasks", "hellaswag", "--data", str(place / "tasks"), "--examples"],
        ["--data", str(place / "text.txt")],
    ):
        command = [sys.executable, "-m", "megatoken.cli", "eval", str(run), *words, "--json", "--nproc", "2"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        (line,) = done.stdout.splitlines()
        alone, both = evaluate(run, *words, capsys=capsys), json.loads(line)
        for answer in (alone, both):
            for grades in answer.get("tasks", {}).values():
                del grades["seconds"]
        if "loss" in both:
            assert both.pop("loss") == pytest.approx(alone.pop("loss"), rel=1e-7)
            for name in ("perplexity", "bits_per_byte"):
                assert both.pop(name) == pytest.approx(alone.pop(name), rel=1e-6)
        assert both == alone


def test_the_loss_of_shards_is_the_runs_own(run: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = evaluate(run, "--data", place / "shards", "--limit", 100000, capsys=capsys)
    last = [row for row in read_metrics(run) if row["kind"] == "val"][-1]
    assert answer["split"] == "val"
    assert answer["target_tokens"] == last["target_tokens"]
    assert answer["loss"] == pytest.approx(last["loss"], rel=1e-6)
    assert answer["bits_per_byte"] == pytest.approx(last["bits_per_byte"], rel=1e-6)
    whole = evaluate(run, "--data", place / "shards", capsys=capsys)
    assert whole["target_tokens"] > answer["target_tokens"]  # what is left over after whole windows
    train = evaluate(run, "--data", place / "shards", "--split", "train", "--limit", 640, capsys=capsys)
    assert (train["split"], train["target_tokens"]) == ("train", 640)


def test_the_loss_of_text_is_over_all_of_it(run: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = evaluate(run, "--data", place / "text.txt", capsys=capsys)
    text = sum(len(line) for line in LINES)
    assert answer["text_bytes"] == text - 1  # nothing comes before the first
    assert answer["target_tokens"] == text - 1 + len(LINES) - 1
    nats = answer["loss"] * answer["target_tokens"]
    assert answer["bits_per_byte"] == pytest.approx(nats / math.log(2) / answer["text_bytes"])
    assert answer["perplexity"] == pytest.approx(math.exp(answer["loss"]))
    assert main(["eval", str(run), "--data", str(place / "text.txt")]) == 0
    assert f"{answer['bits_per_byte']:.4f}" in capsys.readouterr().out


def test_scores_are_drawn_beside_the_curves(run: Path, place: Path) -> None:
    assert main(["plot", str(run), "--out", str(place / "curves.png")]) == 0
    assert (place / "curves.png").stat().st_size > 20_000


def test_a_resume_repeats_no_scores(run: Path, place: Path, tmp_path: Path) -> None:
    def train(*words: str) -> None:
        pretrain(resolve(str(place / "tiny.yaml"), words), tmp_path / "run", Console(to_stderr=True))

    train("save.time_limit=1s", "budget.steps=20")  # stops somewhere, or does not
    train("budget.steps=20")
    for kind in ("eval", "val"):
        told = [
            {k: v for k, v in row.items() if k != "seconds"}
            for row in read_metrics(tmp_path / "run")
            if row["kind"] == kind
        ]
        assert told == [row for row in read_metrics(run) if row["kind"] == kind]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], Exit.CONFIG, "error: nothing to evaluate on — megatoken eval — give --tasks (hellaswag,"),
        (["--tasks", "helaswag"], Exit.CONFIG, "unknown task 'helaswag' — tasks — did you mean hellaswag?"),
        (["--tasks", "piqa", "--data", "PLACE/tasks"], Exit.DATA, "place piqa.jsonl there"),
        (["--tasks", "piqa", "--data", "PLACE/none.jsonl"], Exit.DATA, "no such file — PLACE/none.jsonl"),
        (["--tasks", "piqa", "--data", "PLACE/tasks/lambada.jsonl"], Exit.DATA, "PLACE/tasks/lambada.jsonl:1 — mend"),
        (["--tasks", "piqa", "--limit", "-1"], Exit.CONFIG, "--limit is -1"),
        (["--tasks", "piqa", "--split", "val"], Exit.CONFIG, "--split has no effect here"),
        (["--data", "PLACE/other", "--examples"], Exit.CONFIG, "--examples has no effect here — --examples — leave"),
        (["--data", "PLACE/other", "--fewshot", "3"], Exit.CONFIG, "it is for --harness"),
        (["--data", "PLACE/rows.jsonl"], Exit.DATA, "rows.jsonl:1 — give text or shards; examples of a task need"),
        (["--tasks", "piqa", "--nproc", "0"], Exit.CONFIG, "--nproc is 0 — --nproc — give 1 or more"),
        (["--data", "PLACE/nothing"], Exit.DATA, "no such file, folder or named corpus"),
        (["--data", "PLACE/foreign.bin"], Exit.DATA, "shards were made by tokenizer gpt2 (50,257 ids), the model"),
        (["--data", "PLACE/other"], Exit.DATA, "shards were made by tokenizer bpe:300"),
        (["--tasks", "piqa", "--harness"], Exit.CONFIG, "lm-evaluation-harness is not installed — --harness — pip"),
    ],
)  # fmt: skip
def test_wrong_input_is_one_line(
    run: Path,
    place: Path,
    words: list[str],
    code: Exit,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("megatoken.harness.lm_eval", None)
    found, line = refuse(run, *(word.replace("PLACE", str(place)) for word in words), capsys=capsys)
    assert said.replace("PLACE", str(place)) in line
    assert found == code


def test_a_run_with_a_wrong_task_stops_before_it_begins(place: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "fine line"}\n{"text": 3}\n')
    for words, said in (
        (["evaluate.tasks=lambda"], r"unknown task 'lambda' — tasks — did you mean lambada\?"),
        (["evaluate.tasks=lambada", f"evaluate.tasks_data={tmp_path}/bad.jsonl"], r"bad\.jsonl:2 — mend"),
    ):
        with pytest.raises(Fault, match=said):
            pretrain(resolve(str(place / "tiny.yaml"), words), tmp_path / "run", Console(to_stderr=True))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
