"""`megatoken eval` and `megatoken.eval.evaluate`, and tasks scored while a run trains."""

import io
import json
import math
import shutil
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch

from megatoken.cli.main import main
from megatoken.convert.hf.export import write_hf
from megatoken.data.prepare import prepare
from megatoken.data.tokenizer import Tokenizer, load_tokenizer
from megatoken.errors import ConfigError, DataError, ExitCode, NumericsError
from megatoken.eval.evaluate import evaluate
from megatoken.eval.tasks import Example
from tests.conftest import Ask
from tests.convert.models import TINY_GPT, draw_model
from tests.data.small_dataset import write_external
from tests.ranks import run_ranks
from tests.tiny_run import read_rows, train

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
    (folder / "rows.jsonl").write_text('{"goal": "no text"}\n')
    endings = ((7, "wall"), (5, "wall"), (3, "floor"))
    rows = [
        {
            "activity_label": "Beer",
            "ctx": f"{n} bottles of beer",
            "endings": [f" on the {thing}, take {n % k} down" for k, thing in endings],
            "label": n % 3,
        }
        for n in range(40)
    ]
    write_task(folder / "tasks", "hellaswag", rows)
    write_task(folder / "tasks", "lambada", [{"text": line} for line in LINES[:40]])
    return folder


def write_task(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def train_with_tasks(data: Path, out: Path, *settings: str, stop: int = 0) -> None:
    words = (f"data.path={data}/shards", f"evaluate.tasks_data={data}/tasks", *settings)
    train(out, SETTINGS, *words, stop=stop)


@pytest.fixture(scope="module")
def run(data: Path) -> Path:
    train_with_tasks(data, data / "run")
    return data / "run"


def test_tasks_score_the_same_during_training_and_afterwards(run: Path, data: Path, ask: Ask):
    rows = read_rows(run, "eval")
    assert [(row["step"], row["task"], row["n"]) for row in rows] == [
        (step, task, 30) for step in (0, 10, 20) for task in ("hellaswag", "lambada")
    ]
    result = ask(f"eval {run} --tasks hellaswag,lambada --data {data}/tasks --limit 30")
    for row in rows[-2:]:
        metrics = result["tasks"][row["task"]]
        assert metrics.pop("seconds") > 0
        assert {key: row[key] for key in metrics} == metrics
    assert result["model"] == f"{run} at step 20"


def test_several_models_in_one_table(
    run: Path, data: Path, tmp_path: Path, ask: Ask, capsys: pytest.CaptureFixture[str]
):
    """One of them has a context that no choice fits into."""
    short = tmp_path / "short"
    short.mkdir()
    model_config = replace(TINY_GPT, n_layer=1, vocab_size=257, seq_len=8)
    write_hf(short, draw_model(model_config), load_tokenizer("bytes"), "fp32")
    models = [str(run), str(short)]
    tasks = f"--tasks hellaswag,lambada --data {data}/tasks"
    picture = tmp_path / "scores.svg"
    assert main(["eval", *models, *tasks.split(), "--plot", str(picture)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()[-15:-1]
    assert head.split() == ["model", "parameters", "task", "n", "acc", "acc_norm", "acc_token_mean"]
    sizes = dict(zip(models, ("35,744", "21,248"), strict=True))
    assert [line.split()[:4] for line in lines[:4]] == [
        [model, sizes[model], task, "40"] for model in models for task in ("hellaswag", "lambada")
    ]
    assert " 40 with a choice longer" in lines[2]
    assert lines[4].split()[-6:] == ["124,439,808", "hellaswag", "10,042", "28.92%", "31.14%", "-"]
    assert lines[12].split()[-4:] == ["10,042", "-", "-", "48.93%"]
    names = ("hellaswag", "lambada", "short, 21.25 k", "run, 35.74 k", "chance", "GPT-2 1558M,")
    assert all(f"<!-- {name} -->" in picture.read_text() for name in names)
    together = ask(f"eval {run} {short} {tasks}")["models"]
    assert [answer.pop("parameters") for answer in together] == [35744, 21248]
    for model, answer in zip(models, together, strict=True):
        alone = ask(f"eval {model} {tasks}")
        for metrics in (*alone["tasks"].values(), *answer["tasks"].values()):
            del metrics["seconds"]
        assert alone == answer
    assert main(["eval", *models, "--data", f"{data}/text.txt", "--plot", str(picture)]) == 0
    *_, first, second, _ = capsys.readouterr().out.splitlines()
    assert [first.split()[0], second.split()[0]] == models
    assert "<!-- bits per byte -->" in picture.read_text()


def test_predictions_are_in_file_order_and_give_the_scores(run: Path, data: Path, ask: Ask):
    line = f"eval {run} --tasks hellaswag --data {data}/tasks/hellaswag.jsonl --examples"
    metrics = ask(line)["tasks"]["hellaswag"]
    examples = metrics["examples"]
    assert [example["gold"] for example in examples] == [n % 3 for n in range(40)]
    choices = {"acc": "pred", "acc_norm": "pred_norm", "acc_token_mean": "pred_token_mean"}
    for score, choice in choices.items():
        right = np.array([example[choice] == example["gold"] for example in examples], float)
        assert metrics[score] == right.mean()
        assert metrics["stderr"][score] == pytest.approx(right.std(ddof=1) / math.sqrt(40))
    assert ask(f"{line} --no-token-mean")["tasks"]["hellaswag"]["acc_token_mean"] is None


def eval_on_rank(rank: int, lines: list[str], answers: Path) -> None:
    for number, line in enumerate(lines):
        output = io.StringIO()
        with redirect_stdout(output):
            assert main([*line.split(), "--json", "--nproc", "2"]) == ExitCode.DONE
        if rank == 0:
            (answers / str(number)).write_text(output.getvalue())


def test_two_processes_give_the_result_of_one(run: Path, data: Path, tmp_path: Path, ask: Ask):
    tasks = f"eval {run} --tasks hellaswag --data {data}/tasks --examples"
    text = f"eval {run} --data {data}/text.txt"
    run_ranks(eval_on_rank, [tasks, text], tmp_path, nprocs=2)
    single, two = ask(tasks), json.loads((tmp_path / "0").read_text())
    for result in (single, two):
        del result["tasks"]["hellaswag"]["seconds"]
    assert two == single
    single, two = ask(text), json.loads((tmp_path / "1").read_text())
    for name in ("loss", "perplexity", "bits_per_byte"):
        assert two.pop(name) == pytest.approx(single.pop(name), rel=1e-6)
    assert two == single


def test_loss_on_shards_equals_the_validation_loss_of_the_run(run: Path, data: Path, ask: Ask):
    line = f"eval {run} --data {data}/shards"
    result = ask(f"{line} --limit 100000")
    last = read_rows(run, "val")[-1]
    assert (result["split"], result["target_tokens"]) == ("val", last["target_tokens"])
    assert result["loss"] == pytest.approx(last["loss"], rel=1e-6)
    assert result["bits_per_byte"] == pytest.approx(last["bits_per_byte"], rel=1e-6)
    # And the rest after the last full window.
    assert ask(line)["target_tokens"] > result["target_tokens"]
    train = ask(f"{line} --split train --limit 640")
    assert (train["split"], train["target_tokens"]) == ("train", 640)


def test_data_left_out_are_what_the_runs_trained_on(
    run: Path, data: Path, tmp_path: Path, ask: Ask
):
    expected = ask(f"eval {run} --data {data}/shards")
    assert ask(f"eval {run}") == expected
    shutil.copytree(run, tmp_path / "copy")
    several = ask(f"eval {run} {tmp_path}/copy")["models"]
    assert [model["loss"] for model in several] == [expected["loss"]] * 2


def test_relative_data_of_a_run_are_named_from_another_folder(
    run: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    shutil.copytree(run, tmp_path / "copy")
    config = tmp_path / "copy" / "config.yaml"
    config.write_text(config.read_text().replace(f"{data}/shards", "moved/shards"))
    for command in ("eval", "train"):
        assert main([command, f"{tmp_path}/copy", *["budget.steps=20"][: command == "train"]]) in (
            2,
            3,
        )
        error = capsys.readouterr().err
        assert "moved/shards" in error
        assert "began" in error


def test_loss_on_text_covers_all_of_it(run: Path, data: Path, ask: Ask):
    result = ask(f"eval {run} --data {data}/text.txt")
    text = sum(len(line) for line in LINES)
    assert result["text_bytes"] == text - 1  # the first byte is no target
    assert result["target_tokens"] == text - 1 + len(LINES) - 1
    nats = result["loss"] * result["target_tokens"]
    assert result["bits_per_byte"] == pytest.approx(nats / math.log(2) / result["text_bytes"])
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))


@pytest.mark.parametrize("unk", ["<unk>", None])
def test_text_without_a_known_character_is_measured_or_refused(
    unk: str | None, tmp_path: Path, ask: Ask
):
    vocabulary = {"</s>": 0, "<unk>": 1, "x": 2}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token=unk))
    inner.add_special_tokens(["</s>", "<unk>"])
    tokenizer = Tokenizer(inner, "x", eot=0)
    write_hf(tmp_path, draw_model(replace(TINY_GPT, vocab_size=3)), tokenizer, "fp32")
    (tmp_path / "unknown.txt").write_text("abc<|endoftext|>def<|endoftext|>ghi")
    line = f"eval {tmp_path} --data {tmp_path}/unknown.txt"
    if unk:
        assert ask(line)["text_bytes"] == 9
    else:  # it loses the text
        assert main(line.split()) == ExitCode.DATA


def test_a_model_that_diverged_has_no_scores(data: Path):
    tokenizer, model = load_tokenizer("bytes"), draw_model()
    examples = {"own": [Example((("1 bottle of", " beer"), ("1 bottle of", " wine")), gold=0)]}
    assert evaluate(model, tokenizer, tasks=examples)["tasks"]["own"]["n"] == 1
    with pytest.raises(ConfigError):
        evaluate(model, tokenizer)
    with torch.no_grad():
        model.norm.weight[0] = torch.nan
    with pytest.raises(NumericsError):
        evaluate(model, tokenizer, tasks=examples)
    with pytest.raises(NumericsError):
        evaluate(model, tokenizer, data=data / "text.txt")


def test_resume_repeats_no_scores(run: Path, data: Path, tmp_path: Path):
    for stop in (10, 0):
        train_with_tasks(data, tmp_path / "run", stop=stop)
    for kind in ("eval", "val"):
        rows = [
            [row | {"elapsed_seconds": 0} for row in read_rows(folder, kind)]
            for folder in (tmp_path / "run", run)
        ]
        assert rows[0] == rows[1]


ERRORS = """
2 DATA/tasks
2 DATA/else
2 --tasks helaswag
3 --tasks piqa --data DATA/tasks
3 --tasks piqa --data DATA/tasks/lambada.jsonl
2 --tasks piqa --nproc 0
2 --tasks piqa --harness
3 --data DATA/rows.jsonl
2 --data DATA/text.txt --split train
3 --data DATA/nothing
3 --data DATA/foreign.bin
3 --data DATA/other
"""


@pytest.mark.parametrize("row", ERRORS.strip().splitlines())
def test_wrong_input_is_a_one_line_error(
    run: Path,
    data: Path,
    row: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("megatoken.eval.lm_eval_adapter.lm_eval", None)
    (data / "else" / "checkpoints").mkdir(parents=True, exist_ok=True)
    (data / "else" / "config.yaml").write_text("data: {path: other}\nbudget: {steps: 1}\n")
    code, *words = row.replace("DATA", str(data)).split()
    assert main(["eval", str(run), *words]) == int(code)
    assert capsys.readouterr().err.count("\n") == 1


def test_run_with_a_wrong_task_stops_before_training(data: Path, tmp_path: Path):
    write_task(tmp_path, "lambada", [{"text": "fine line"}, {"text": 3}])
    for setting, error in (
        ("evaluate.tasks=lambda", ConfigError),
        (f"evaluate.tasks_data={tmp_path}", DataError),
    ):
        with pytest.raises(error):
            train_with_tasks(data, tmp_path / "run", setting)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
