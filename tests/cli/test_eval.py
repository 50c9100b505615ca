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
from megatoken.convert.load_pretrained import load_pretrained
from megatoken.data.prepare import prepare
from megatoken.data.tokenizer import Tokenizer, load_tokenizer
from megatoken.errors import ConfigError, DataError, ExitCode, NumericsError
from megatoken.eval.evaluate import evaluate
from megatoken.eval.tasks import Example
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


def run_eval(*arguments: object, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["eval", *map(str, arguments), "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert isinstance(result, dict)
    return result


def test_tasks_score_the_same_during_training_and_afterwards(
    run: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = read_rows(run, "eval")
    assert [(row["step"], row["task"], row["n"]) for row in rows] == [
        (step, task, 30) for step in (0, 10, 20) for task in ("hellaswag", "lambada")
    ]
    result = run_eval(
        run, "--tasks", "hellaswag,lambada", "--data", data / "tasks", "--limit", 30, capsys=capsys
    )
    for row in rows[-2:]:
        metrics = result["tasks"][row["task"]]
        assert metrics.pop("seconds") > 0
        assert {key: row[key] for key in metrics} == metrics
    assert result["model"] == f"{run} at step 20"


def test_several_models_in_one_table(
    run: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of them has a context that no choice fits into."""
    short = tmp_path / "short"
    short.mkdir()
    model_config = replace(TINY_GPT, n_layer=1, vocab_size=257, seq_len=8)
    write_hf(short, draw_model(model_config), load_tokenizer("bytes"), "fp32")
    models = [str(run), str(short)]
    tasks = ["--tasks", "hellaswag,lambada", "--data", f"{data}/tasks"]
    picture = tmp_path / "scores.svg"
    assert main(["eval", *models, *tasks, "--plot", str(picture)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()[-6:-1]
    assert head.split() == ["model", "parameters", "task", "n", "acc", "acc_norm", "acc_token_mean"]
    sizes = dict(zip(models, ("35,744", "21,248"), strict=True))
    assert [line.split()[:4] for line in lines] == [
        [model, sizes[model], task, "40"] for model in models for task in ("hellaswag", "lambada")
    ]
    assert " 40 with a choice longer" in lines[2]
    names = ("hellaswag", "lambada", "short", "run", "21.25 k", "acc_norm")
    assert all(f"<!-- {name} -->" in picture.read_text() for name in names)
    together = run_eval(*models, *tasks, capsys=capsys)["models"]
    assert [answer.pop("parameters") for answer in together] == [35744, 21248]
    for model, answer in zip(models, together, strict=True):
        alone = run_eval(model, *tasks, capsys=capsys)
        for metrics in (*alone["tasks"].values(), *answer["tasks"].values()):
            del metrics["seconds"]
        assert alone == answer
    assert main(["eval", *models, "--data", f"{data}/text.txt", "--plot", str(picture)]) == 0
    *_, first, second, _ = capsys.readouterr().out.splitlines()
    assert [first.split()[0], second.split()[0]] == models
    assert "<!-- bits per byte -->" in picture.read_text()


def test_predictions_are_in_file_order_and_give_the_scores(
    run: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = data / "tasks" / "hellaswag.jsonl"
    arguments = [run, "--tasks", "hellaswag", "--data", file, "--examples"]
    metrics = run_eval(*arguments, capsys=capsys)["tasks"]["hellaswag"]
    examples = metrics["examples"]
    assert [example["gold"] for example in examples] == [n % 3 for n in range(40)]
    choices = {"acc": "pred", "acc_norm": "pred_norm", "acc_token_mean": "pred_token_mean"}
    for score, choice in choices.items():
        right = np.array([example[choice] == example["gold"] for example in examples], float)
        assert metrics[score] == right.mean()
        assert metrics["stderr"][score] == pytest.approx(right.std(ddof=1) / math.sqrt(40))
    without = run_eval(*arguments, "--no-token-mean", capsys=capsys)["tasks"]["hellaswag"]
    assert without["acc_token_mean"] is None
    assert [example["pred"] for example in without["examples"]] == [
        example["pred"] for example in examples
    ]


def eval_on_rank(rank: int, arguments: list[list[str]], answers: Path) -> None:
    for number, words in enumerate(arguments):
        output = io.StringIO()
        with redirect_stdout(output):
            assert main(["eval", *words, "--json", "--nproc", "2"]) == ExitCode.DONE
        if rank == 0:
            (answers / str(number)).write_text(output.getvalue())


def test_two_processes_give_the_result_of_one(
    run: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = [str(run), "--tasks", "hellaswag", "--data", f"{data}/tasks", "--examples"]
    text = [str(run), "--data", f"{data}/text.txt"]
    run_ranks(eval_on_rank, [tasks, text], tmp_path, nprocs=2)
    single, two = run_eval(*tasks, capsys=capsys), json.loads((tmp_path / "0").read_text())
    for result in (single, two):
        del result["tasks"]["hellaswag"]["seconds"]
    assert two == single
    single, two = run_eval(*text, capsys=capsys), json.loads((tmp_path / "1").read_text())
    for name in ("loss", "perplexity", "bits_per_byte"):
        assert two.pop(name) == pytest.approx(single.pop(name), rel=1e-6)
    assert two == single


def test_loss_on_shards_equals_the_validation_loss_of_the_run(
    run: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_eval(run, "--data", data / "shards", "--limit", 100000, capsys=capsys)
    last = read_rows(run, "val")[-1]
    assert result["split"] == "val"
    assert result["target_tokens"] == last["target_tokens"]
    assert result["loss"] == pytest.approx(last["loss"], rel=1e-6)
    assert result["bits_per_byte"] == pytest.approx(last["bits_per_byte"], rel=1e-6)
    whole = run_eval(run, "--data", data / "shards", capsys=capsys)
    assert (
        whole["target_tokens"] > result["target_tokens"]
    )  # and the rest after the last whole window
    train = run_eval(
        run, "--data", data / "shards", "--split", "train", "--limit", 640, capsys=capsys
    )
    assert (train["split"], train["target_tokens"]) == ("train", 640)


def test_data_left_out_are_what_the_runs_trained_on(
    run: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = run_eval(run, "--data", data / "shards", capsys=capsys)
    assert run_eval(run, capsys=capsys) == given
    shutil.copytree(run, tmp_path / "copy")
    several = run_eval(run, tmp_path / "copy", capsys=capsys)["models"]
    assert [model["loss"] for model in several] == [given["loss"]] * 2


def test_loss_on_text_covers_all_of_it(
    run: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_eval(run, "--data", data / "text.txt", capsys=capsys)
    text = sum(len(line) for line in LINES)
    assert result["text_bytes"] == text - 1  # the first byte is no target
    assert result["target_tokens"] == text - 1 + len(LINES) - 1
    nats = result["loss"] * result["target_tokens"]
    assert result["bits_per_byte"] == pytest.approx(nats / math.log(2) / result["text_bytes"])
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
    assert main(["eval", str(run), "--data", f"{data}/text.txt"]) == 0
    printed = capsys.readouterr().out
    assert f"{result['bits_per_byte']:.4f}" in printed


def test_python_function_returns_what_the_command_prints(
    run: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = load_pretrained(str(run), print)
    command = run_eval(
        run, "--tasks", "hellaswag,lambada", "--data", data / "tasks", "--limit", 9, capsys=capsys
    )
    for tasks in ("hellaswag,lambada", ["hellaswag", "lambada"]):
        result = evaluate(loaded.model, loaded.tokenizer, tasks=tasks, data=data / "tasks", limit=9)
        for metrics, expected in zip(
            result["tasks"].values(), command["tasks"].values(), strict=True
        ):
            assert metrics | {"seconds": 0} == expected | {"seconds": 0}
    examples = {"own": [Example((("1 bottle of", " beer"), ("1 bottle of", " wine")), gold=0)]}
    assert evaluate(loaded.model, loaded.tokenizer, tasks=examples)["tasks"]["own"]["n"] == 1
    command = run_eval(run, "--data", data / "shards", capsys=capsys)
    assert evaluate(loaded.model, loaded.tokenizer, data=data / "shards") == {
        key: value for key, value in command.items() if key != "model"
    }
    with pytest.raises(ConfigError):
        evaluate(loaded.model, loaded.tokenizer)


def test_text_without_a_known_character_is_no_nan(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A BPE whose unk is special, and one without unk, which loses the text."""
    for unk, loses_text in (("<unk>", False), (None, True)):
        folder = data / f"unk-{unk}"
        folder.mkdir()
        vocabulary = {"</s>": 0, "<unk>": 1, "x": 2}
        inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token=unk))
        inner.add_special_tokens(["</s>", "<unk>"])
        tokenizer = Tokenizer(inner, "x", eot=0)
        assert tokenizer.drops_unknown == loses_text
        write_hf(folder, draw_model(replace(TINY_GPT, vocab_size=3)), tokenizer, "fp32")
        (folder / "unknown.txt").write_text("abc<|endoftext|>def<|endoftext|>ghi")
        assert main(["eval", str(folder), "--data", f"{folder}/unknown.txt", "--json"]) == 0
        printed = capsys.readouterr()
        assert "NaN" not in printed.out
        found = json.loads(printed.out)
        assert (found["text_bytes"], found["bits_per_byte"] is None) == (
            (0, True) if loses_text else (8, False)
        )
        assert main(["eval", str(folder), "--data", f"{folder}/unknown.txt"]) == 0
        assert (" - " in capsys.readouterr().out) == loses_text  # bits per byte


def test_a_model_that_diverged_has_no_scores(data: Path) -> None:
    tokenizer, model = load_tokenizer("bytes"), draw_model()
    with torch.no_grad():
        model.norm.weight[0] = torch.nan
    examples = {"own": [Example((("1 bottle of", " beer"), ("1 bottle of", " wine")), gold=0)]}
    with pytest.raises(NumericsError, match="log-likelihoods are not finite numbers"):
        evaluate(model, tokenizer, tasks=examples)
    with pytest.raises(NumericsError, match="the loss is not finite"):
        evaluate(model, tokenizer, data=data / "text.txt")


def test_resume_repeats_no_scores(run: Path, data: Path, tmp_path: Path) -> None:
    for stop in (10, 0):
        train_with_tasks(data, tmp_path / "run", stop=stop)
    for kind in ("eval", "val"):
        rows = [
            [row | {"elapsed_seconds": 0} for row in read_rows(folder, kind)]
            for folder in (tmp_path / "run", run)
        ]
        assert rows[0] == rows[1]


ERRORS = [
    ("DATA/tasks", ExitCode.CONFIG),
    ("DATA/else", ExitCode.CONFIG),
    ("--tasks helaswag", ExitCode.CONFIG),
    ("--tasks piqa --data DATA/tasks", ExitCode.DATA),
    ("--tasks piqa --data DATA/tasks/lambada.jsonl", ExitCode.DATA),
    ("--tasks piqa --nproc 0", ExitCode.CONFIG),
    ("--tasks piqa --harness", ExitCode.CONFIG),
    ("--data DATA/rows.jsonl", ExitCode.DATA),
    ("--data DATA/text.txt --split train", ExitCode.CONFIG),
    ("--data DATA/nothing", ExitCode.DATA),
    ("--data DATA/foreign.bin", ExitCode.DATA),
    ("--data DATA/other", ExitCode.DATA),
]


@pytest.mark.parametrize(("line", "code"), ERRORS)
def test_wrong_input_is_a_one_line_error(
    run: Path,
    data: Path,
    line: str,
    code: ExitCode,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("megatoken.eval.lm_eval_adapter.lm_eval", None)
    (data / "else" / "checkpoints").mkdir(parents=True, exist_ok=True)
    (data / "else" / "config.yaml").write_text("data: {path: other}\nbudget: {steps: 1}\n")
    assert main(["eval", str(run), *line.replace("DATA", str(data)).split()]) == code
    assert capsys.readouterr().err.count("\n") == 1


def test_run_with_a_wrong_task_stops_before_training(data: Path, tmp_path: Path) -> None:
    write_task(tmp_path, "lambada", [{"text": "fine line"}, {"text": 3}])
    for setting, error in (
        ("evaluate.tasks=lambda", ConfigError),
        (f"evaluate.tasks_data={tmp_path}", DataError),
    ):
        with pytest.raises(error):
            train_with_tasks(data, tmp_path / "run", setting)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
