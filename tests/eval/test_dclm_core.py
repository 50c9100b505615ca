"""CORE predicts as plain forwards over nanochat's prompts do, example by example."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megatoken.cli.main import main
from megatoken.convert.hf.export import write_hf
from megatoken.data.tokenizer import Tokenizer, load_tokenizer
from megatoken.errors import ConfigError, DataError
from megatoken.eval.dclm_core import encode_core_task, read_bundle
from megatoken.eval.evaluate import evaluate, evaluate_tasks
from megatoken.model.gpt import GPT
from tests.eval.reference_scorer import CPU, SINGLE, make_model, write_jsonl

Row = dict[str, Any]
CONTEXT = 90
# Task, shots, delimiter, accuracy of random answers in percent, rows.
TASKS = (
    ("choices", "multiple_choice", 3, None, 25, 40),
    ("long_choices", "multiple_choice", 5, "\nb: ", 50, 30),
    ("schema", "schema", 0, " ", 50, 40),
    ("schema_shots", "schema", 4, " ", 50, 40),
    ("words", "language_modeling", 2, "b:", 0, 60),
    ("long_words", "language_modeling", 5, "b: ", 0, 60),
)


def make_row(kind: str, number: int) -> Row:
    rng = random.Random(f"{kind} {number}")

    def text(low: int, high: int) -> str:
        return "".join(rng.choices("aabbcd .", k=rng.randint(low, high)))

    if kind == "multiple_choice":
        choices = [text(1, 6) for _ in range(4)]
        if number % 5 == 1:  # one begins another
            choices = [choices[0] + " a", *choices[:2]]
        if number % 5 == 2:  # the first has no token of its own
            choices = ["ab", "ab c", "ab d."]
        return {"query": text(3, 30), "choices": choices, "gold": number % len(choices)}
    if kind == "schema":
        contexts = [text(4, 20), text(4, 30)]
        return {"context_options": contexts, "continuation": text(1, 9), "gold": number % 2}
    return {"context": f"{text(2, 25)}  \n", "continuation": rng.choice("12")}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bundle(tmp_path_factory.mktemp("bundle"))


def write_bundle(folder: Path) -> Path:
    (folder / "eval_data" / "sub").mkdir(parents=True)
    tasks = []
    baselines = ["Eval Task,Task Category,Random baseline"]
    for name, kind, shots, delimiter, baseline, n in TASKS:
        uri = f"sub/{name}.jsonl"
        write_jsonl(folder / "eval_data" / uri, [make_row(kind, i) for i in range(n)])
        row = {"label": name, "dataset_uri": uri, "num_fewshot": [shots], "icl_task_type": kind}
        tasks.append(row | ({"continuation_delimiter": delimiter} if delimiter is not None else {}))
        baselines.append(f"{name},letters,{baseline}")
    (folder / "core.yaml").write_text(yaml.safe_dump({"icl_tasks": tasks}))
    (folder / "eval_meta_data.csv").write_text("\n".join(baselines))
    return folder


def make_tokenizer(name: str) -> Tokenizer:
    texts = [json.dumps(make_row(kind, i)) for _, kind, *_ in TASKS for i in range(30)]
    texts.append("1 2 1 " * 99)
    return load_tokenizer(name, lambda: iter(texts))


def make_letter_model(tokenizer: Tokenizer) -> GPT:
    """Return a model whose argmax is among the ids of "1" and " 2" everywhere."""
    model = make_model(tokenizer.vocab_size, seq_len=CONTEXT)
    likely = sorted({*tokenizer.encode("1 2 1").tolist()})
    weight = model.tokens.weight.detach()
    chosen = weight[likely].clone()
    weight *= 0.2
    weight[likely] = chosen
    model.norm.bias.data = torch.linalg.pinv(chosen) @ torch.full((len(likely),), 8.0)
    return model.eval()


@torch.no_grad()
def losses_of(model: GPT, ids: list[int]) -> tuple[list[float], list[bool]]:
    """Return the loss of each id but the first, and whether it is the argmax."""
    logits = model.logits(torch.tensor([ids[:-1]]))[0].float()
    targets = torch.tensor(ids[1:])
    losses = -torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
    return losses.tolist(), (logits.argmax(-1) == targets).tolist()


def is_right(
    model: GPT, tokenizer: Tokenizer, task: tuple[Any, ...], rows: list[Row], i: int
) -> bool:
    """Answer a row from the rendered text, with a forward for each of its choices."""
    _, kind, n_shots, delimiter, *_ = task
    delimiter = " " if delimiter is None else delimiter

    def join(row: Row, choice: int) -> str:
        if kind == "multiple_choice":
            return row["query"] + delimiter + row["choices"][choice]
        if kind == "schema":
            return row["context_options"][choice] + delimiter + row["continuation"]
        return row["context"].strip() + delimiter + row["continuation"]

    others = [number for number in range(len(rows)) if number != i]
    shots = [rows[number] for number in random.Random(1234 + i).sample(others, n_shots)]
    lead = "".join(join(shot, shot.get("gold", 0)) + "\n\n" for shot in shots)
    row = rows[i]
    choices = len(row.get("choices") or row.get("context_options") or [""])
    texts = [lead + join(row, choice) for choice in range(choices)]
    encoded = [[tokenizer.eot, *tokenizer.encode(text).tolist()] for text in texts]
    if kind == "language_modeling":
        alone = tokenizer.encode((lead + row["context"].strip() + delimiter).strip())
        _, greedy = losses_of(model, encoded[0][-CONTEXT:])
        return all(greedy[-(len(encoded[0]) - 1 - len(alone)) :])
    shared = 0
    from_left = kind == "multiple_choice"
    while shared < min(map(len, encoded)):
        if len({ids[shared if from_left else -1 - shared] for ids in encoded}) > 1:
            break
        shared += 1
    means = []
    for ids in encoded:
        count = len(ids) - shared if from_left else shared
        losses, _ = losses_of(model, ids[-CONTEXT:])
        means.append(sum(losses[-count:]) / count if count else math.nan)
    best = 0
    for choice, mean in enumerate(means):
        if mean < means[best]:
            best = choice
    return best == row["gold"]


def read_rows(bundle: Path, name: str) -> list[Row]:
    lines = (bundle / f"eval_data/sub/{name}.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    random.Random(1337).shuffle(rows)
    return rows


def list_right(metrics: Row) -> list[bool]:
    score = "pred" if metrics["acc_token_mean"] is None else "pred_token_mean"
    return [example[score] == example["gold"] for example in metrics["examples"]]


@pytest.mark.parametrize("name", ["bytes", "bpe:290"])
def test_every_example_is_answered_as_by_plain_forwards(bundle: Path, name: str):
    tokenizer = make_tokenizer(name)
    model = make_letter_model(tokenizer)
    tasks = read_bundle(bundle)
    result = evaluate_tasks(model, tokenizer, tasks, CPU, SINGLE, per_example=True)
    assert list(result["tasks"]) == [task[0] for task in TASKS]
    centered = []
    for task in TASKS:
        rows = read_rows(bundle, task[0])
        expected = [is_right(model, tokenizer, task, rows, i) for i in range(len(rows))]
        metrics = result["tasks"][task[0]]
        assert list_right(metrics) == expected
        assert 0 < sum(expected) < len(rows) or task[0] == "long_words"
        accuracy, baseline = sum(expected) / len(rows), task[4] / 100
        centered.append((accuracy - baseline) / (1 - baseline))
        assert metrics["centered"] == pytest.approx(centered[-1])
        assert "n_cut" not in metrics
        untruncated = encode_core_task(tasks[task[0]], tokenizer, 10_000)
        longest = max(example.tree.positions.max() for example in untruncated)
        assert longest > CONTEXT or "long" not in task[0]
    assert result["core"] == pytest.approx(sum(centered) / len(TASKS))


def test_few_shot_examples_are_drawn_from_the_first_examples(bundle: Path):
    tokenizer = make_tokenizer("bytes")
    model = make_letter_model(tokenizer)
    result = evaluate_tasks(
        model, tokenizer, read_bundle(bundle, 12), CPU, SINGLE, per_example=True
    )
    for task in TASKS:
        rows = read_rows(bundle, task[0])[:12]
        expected = [is_right(model, tokenizer, task, rows, i) for i in range(12)]
        assert list_right(result["tasks"][task[0]]) == expected


def test_table_ends_with_core(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tokenizer = make_tokenizer("bytes")
    model = make_letter_model(tokenizer)
    write_hf(tmp_path, model, tokenizer, "fp32")
    words = f"eval {tmp_path} --tasks core --data {bundle} --limit 7".split()
    assert main(words) == 0
    rows = [line.split()[2:] for line in capsys.readouterr().out.splitlines()[-7:]]
    assert [row[0] for row in rows] == [*(task[0] for task in TASKS), "core"]
    answer = evaluate(model, tokenizer, tasks="core", data=bundle, limit=7)
    assert float(rows[-1][-1].rstrip("%")) / 100 == pytest.approx(answer["core"], abs=1e-4)
    assert main([*words[:-1], "5"]) == 2  # of 5 shots


def remove_baseline(folder: Path) -> None:
    (folder / "eval_meta_data.csv").write_text("Eval Task,Random baseline\nwords,0")


def remove_rows(folder: Path) -> None:
    (folder / "eval_data/sub/words.jsonl").unlink()


def break_row(folder: Path) -> None:
    write_jsonl(folder / "eval_data/sub/words.jsonl", [{"query": "a"}])


def break_yaml(folder: Path) -> None:
    (folder / "core.yaml").write_text("icl_tasks: [}")


@pytest.mark.parametrize("damage", [remove_baseline, remove_rows, break_row, break_yaml])
def test_damaged_bundle(tmp_path: Path, damage: Callable[[Path], None]):
    damage(write_bundle(tmp_path))
    with pytest.raises(DataError):
        read_bundle(tmp_path)


def test_core_without_its_bundle(tmp_path: Path):
    with pytest.raises(ConfigError):
        read_bundle(None)
    with pytest.raises(DataError):
        read_bundle(tmp_path)
