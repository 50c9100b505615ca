"""`megatoken eval` and `megatoken.inference.evaluate`, and tasks scored while a run trains."""

import json
import math
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch

from megatoken.base.errors import ConfigError, DataError, ExitCode, NumericsError
from megatoken.cli.main import main
from megatoken.convert.hf.export import write_hf
from megatoken.inference.evaluate import evaluate
from megatoken.inference.scorer import BATCH_NODES
from megatoken.inference.tasks import Example
from megatoken.text.prepare import prepare
from megatoken.text.tokenizer import Tokenizer, load_tokenizer
from tests.conftest import Ask, Call
from tests.convert.models import TINY_GPT, draw_model
from tests.data.small_dataset import write_external
from tests.ranks import run_ranks
from tests.tiny_run import read_rows, train, write_jsonl

SETTINGS = """model.seq_len=64 budget.steps=20 budget.batch_tokens=512 save.every=10steps
    evaluate.every=10steps evaluate.tokens=100000 evaluate.tasks=hellaswag,lambada
    evaluate.tasks_every=10steps evaluate.tasks_limit=30"""
LINES = [f"{n} bottles of beer on the wall, take {n % 7} down" for n in range(400)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text, and shards and tasks made of it."""
    folder = tmp_path_factory.mktemp("eval")
    text = folder / "text.txt"
    text.write_text("<|endoftext|>".join(LINES))
    prepare(text, folder / "shards", tokenizer="bytes", val_fraction=0.1)
    prepare(text, folder / "other", tokenizer="bpe:300", val_fraction=0.0)
    write_external(folder / "foreign.bin", np.arange(200, dtype=np.uint16))
    write_jsonl(folder / "rows.jsonl", [{"goal": "no text"}])
    endings = (" on the wall, take {} down", " on the wall, take {} off", " on the floor, take {}")
    rows = [
        {
            "activity_label": "Beer",
            "ctx": f"{n} bottles of beer",
            "endings": [ending.format(n % 7) for ending in endings],
            "label": n % 3,
        }
        for n in range(40)
    ]
    write_jsonl(folder / "tasks/hellaswag.jsonl", rows)
    write_jsonl(folder / "tasks/lambada.jsonl", [{"text": line} for line in LINES[:40]])
    return folder


def train_with_tasks(data: Path, out: Path, setting: str = "", stop: int = 0) -> Path:
    paths = f"data.path={data}/shards evaluate.tasks_data={data}/tasks"
    train(out, SETTINGS, paths, setting, stop=stop)
    return out


@pytest.fixture(scope="module")
def run(data: Path) -> Path:
    return train_with_tasks(data, data / "run")


def without_seconds(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return the scores of tasks without the time they took."""
    assert all(scores.pop("seconds") > 0 for scores in metrics["tasks"].values())
    return metrics


def test_tasks_score_the_same_during_training_and_afterwards(run: Path, data: Path, ask: Ask):
    rows = read_rows(run, "eval")
    assert [(row["step"], row["task"], row["n"]) for row in rows] == [
        (step, task, 30) for step in (0, 10, 20) for task in ("hellaswag", "lambada")
    ]
    line = f"eval {run} --tasks hellaswag,lambada --data {data}/tasks --limit 30"
    result = without_seconds(ask(line))
    for row in rows[-2:]:
        assert result["tasks"][row["task"]].items() <= row.items()
    assert result["model"] == f"{run} at step 20"


def test_several_models_score_as_each_alone(run: Path, data: Path, tmp_path: Path, ask: Ask):
    """One of them has a context that no choice fits into."""
    short = tmp_path / "short"
    short.mkdir()
    model_config = replace(TINY_GPT, n_layer=1, vocab_size=257, seq_len=8)
    write_hf(short, draw_model(model_config), load_tokenizer("bytes"), "fp32")
    tasks = f"--tasks hellaswag,lambada --data {data}/tasks"
    together = ask(f"eval {run} {short} {tasks} --plot {tmp_path}/scores.svg")["models"]
    assert [result.pop("parameters") for result in together] == [35744, 21248]
    alone = [ask(f"eval {model} {tasks}") for model in (run, short)]
    assert [*map(without_seconds, together)] == [*map(without_seconds, alone)]
    assert (tmp_path / "scores.svg").is_file()


def test_predictions_are_in_file_order_and_give_the_scores(run: Path, data: Path, ask: Ask):
    line = f"eval {run} --tasks hellaswag --data {data}/tasks/hellaswag.jsonl --examples"
    metrics = ask(line)["tasks"]["hellaswag"]
    gold = [n % 3 for n in range(40)]
    assert [example["gold"] for example in metrics["examples"]] == gold
    choices = {"acc": "pred", "acc_norm": "pred_norm", "acc_token_mean": "pred_token_mean"}
    for score, choice in choices.items():
        right = np.equal([example[choice] for example in metrics["examples"]], gold)
        assert metrics[score] == right.mean()
        assert metrics["stderr"][score] == pytest.approx(right.std(ddof=1) / math.sqrt(40))
    assert ask(f"{line} --no-token-mean")["tasks"]["hellaswag"]["acc_token_mean"] is None


def eval_on_rank(rank: int, lines: list[str], answers: Path) -> None:
    BATCH_NODES["cpu"] = 64
    for number, line in enumerate(lines):
        with (answers / f"{number}-{rank}").open("w") as file, redirect_stdout(file):
            assert main([*line.split(), "--json", "--nproc", "2"]) == ExitCode.DONE


@pytest.mark.long
def test_two_processes_give_the_result_of_one(
    run: Path, data: Path, tmp_path: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch
):
    tasks = f"eval {run} --tasks hellaswag --data {data}/tasks --examples --limit 39"
    text = f"eval {run} --data {data}/text.txt"
    monkeypatch.setitem(BATCH_NODES, "cpu", 64)  # an example a batch
    run_ranks(eval_on_rank, [tasks, text], tmp_path, nprocs=2)
    of_tasks, of_text = (json.loads((tmp_path / f"{number}-0").read_text()) for number in (0, 1))
    assert without_seconds(of_tasks) == without_seconds(ask(tasks))
    expected = ask(text)
    for name in ("loss", "perplexity", "bits_per_byte"):
        assert of_text.pop(name) == pytest.approx(expected.pop(name), rel=1e-6)
    assert of_text == expected


def test_losses_of_shards_and_text(run: Path, data: Path, ask: Ask):
    line = f"eval {run} --data {data}/shards"
    last = read_rows(run, "val")[-1]
    result = ask(f"{line} --limit 100000")
    assert (result["split"], result["target_tokens"]) == ("val", last["target_tokens"])
    for name in ("loss", "bits_per_byte"):
        assert result[name] == pytest.approx(last[name], rel=1e-6)
    full = ask(line)  # and the rest after the last full window
    assert full["target_tokens"] > result["target_tokens"]
    assert ask(f"eval {run}") == full  # without --data: what it was trained on
    several = ask(f"eval {run} {run}")["models"]
    assert [model["loss"] for model in several] == [full["loss"]] * 2
    train = ask(f"{line} --split train --limit 640")
    assert (train["split"], train["target_tokens"]) == ("train", 640)
    text = ask(f"eval {run} --data {data}/text.txt")
    n_bytes = sum(map(len, LINES)) - 1  # the first byte is not a target
    assert text["text_bytes"] == n_bytes
    assert text["target_tokens"] == n_bytes + len(LINES) - 1


@pytest.mark.parametrize("unk", ["<unk>", None])
def test_text_without_a_known_character_is_measured_or_refused(
    unk: str | None, tmp_path: Path, ask: Ask, call: Call
):
    vocabulary = {"</s>": 0, "<unk>": 1, "x": 2}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token=unk))
    inner.add_special_tokens(["</s>", "<unk>"])
    model = draw_model(replace(TINY_GPT, vocab_size=3))
    write_hf(tmp_path, model, Tokenizer(inner, "x", eot=0), "fp32")
    (tmp_path / "unknown.txt").write_text("abc<|endoftext|>def<|endoftext|>ghi")
    line = f"eval {tmp_path} --data {tmp_path}/unknown.txt"
    if unk:
        assert ask(line)["text_bytes"] == 9
    else:  # it loses the text
        assert call(line)[0] == ExitCode.DATA


def test_a_model_that_diverged_has_no_scores(data: Path):
    tokenizer, model = load_tokenizer("bytes"), draw_model()
    examples = {"own": [Example((("1 bottle of", " beer"), ("1 bottle of", " wine")), gold=0)]}
    assert evaluate(model, tokenizer, tasks=examples)["tasks"]["own"]["n"] == 1
    with pytest.raises(ConfigError):
        evaluate(model, tokenizer)
    model.norm.weight.data[0] = torch.nan
    with pytest.raises(NumericsError):
        evaluate(model, tokenizer, tasks=examples)
    with pytest.raises(NumericsError):
        evaluate(model, tokenizer, data=data / "text.txt")


def test_resume_repeats_no_scores(run: Path, data: Path, tmp_path: Path):
    for stop in (10, 0):
        train_with_tasks(data, tmp_path / "run", stop=stop)
    for kind in ("eval", "val"):
        resumed, straight = (
            [row | {"elapsed_seconds": 0} for row in read_rows(folder, kind)]
            for folder in (tmp_path / "run", run)
        )
        assert resumed == straight


ERRORS = """\
2 DATA/tasks
2 DATA/else
2 --tasks helaswag
3 --tasks piqa --data DATA/tasks
3 --tasks piqa --data DATA/nowhere.jsonl
2 --tasks piqa,lambada --data DATA/tasks/lambada.jsonl
2 --tasks ,
2 --tasks core
3 --tasks core --data DATA/tasks
3 --tasks piqa --data DATA/tasks/lambada.jsonl
2 --tasks piqa --nproc 0
2 --tasks piqa --harness
3 --data DATA/rows.jsonl
2 --data DATA/text.txt --split train
3 --data DATA/nothing
3 --data DATA/foreign.bin
3 --data DATA/other
"""


def test_wrong_input_is_a_one_line_error(
    run: Path, data: Path, call: Call, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("megatoken.inference.lm_eval_adapter.lm_eval", None)
    (data / "else/checkpoints").mkdir(parents=True)
    (data / "else/config.yaml").write_text("{data: {path: other}, budget: {steps: 1}}")
    for row in ERRORS.splitlines():
        expected, arguments = row.replace("DATA", str(data)).split(maxsplit=1)
        code, _, error = call(f"eval {run} {arguments}")
        assert (code, error.count("\n")) == (int(expected), 1), row


def test_run_with_a_wrong_task_stops_before_training(data: Path, tmp_path: Path):
    write_jsonl(tmp_path / "lambada.jsonl", [{"text": "fine line"}, {"text": 3}])
    settings = {"tasks=lambda": ConfigError, f"tasks_data={tmp_path}": DataError}
    for setting, error in settings.items():
        with pytest.raises(error):
            train_with_tasks(data, tmp_path / "run", f"evaluate.{setting}")
    assert not (tmp_path / "run/metrics.jsonl").exists()
