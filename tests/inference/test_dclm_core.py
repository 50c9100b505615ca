"""CORE predicts as plain forwards over nanochat's prompts do, example by example."""

import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megatoken.base.errors import DataError, ExitCode
from megatoken.convert.hf.export import write_hf
from megatoken.inference.dclm_core import encode_core_task, read_bundle
from megatoken.inference.evaluate import evaluate, evaluate_tasks
from megatoken.model.gpt import GPT
from megatoken.text.load_pretrained import LoadedModel
from megatoken.text.tokenizer import Tokenizer, load_tokenizer
from tests.conftest import Call
from tests.inference.reference_scorer import CPU, SINGLE, log_probabilities, make_model
from tests.tiny_run import write_jsonl

Row = dict[str, Any]
CONTEXT = 90
# Task, shots, delimiter, accuracy of random answers in percent, rows.
TASKS = yaml.safe_load("""
- [choices, multiple_choice, 3, null, 25, 40]
- [long_choices, multiple_choice, 5, "\\nb: ", 50, 30]
- [schema, schema, 0, " ", 50, 40]
- [schema_shots, schema, 4, " ", 50, 40]
- [words, language_modeling, 2, "b:", 0, 60]
- [long_words, language_modeling, 5, "b: ", 0, 60]
""")


def make_row(kind: str, number: int) -> Row:
    rng = random.Random(f"{kind} {number}")

    def text(low, high):
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


def render(kind: str, row: Row, delimiter: str) -> list[str]:
    """Return the text with each choice."""
    if kind == "multiple_choice":
        return [row["query"] + delimiter + choice for choice in row["choices"]]
    if kind == "schema":
        return [context + delimiter + row["continuation"] for context in row["context_options"]]
    return [row["context"].strip() + delimiter + row["continuation"]]


def is_right(model: GPT, tokenizer: Tokenizer, task: list[Any], rows: list[Row], i: int) -> bool:
    """Answer a row from the rendered text, with a forward for each of its choices."""
    _, kind, n_shots, delimiter, *_ = task
    delimiter = " " if delimiter is None else delimiter
    others = [row for row in rows if row is not rows[i]]
    shots = random.Random(1234 + i).sample(others, n_shots)
    lead = "".join(render(kind, shot, delimiter)[shot.get("gold", 0)] + "\n\n" for shot in shots)
    texts = [lead + text for text in render(kind, rows[i], delimiter)]
    encoded = [[tokenizer.eot, *tokenizer.encode(text).tolist()] for text in texts]
    if kind == "language_modeling":
        alone = tokenizer.encode((lead + rows[i]["context"].strip() + delimiter).strip())
        count = len(encoded[0]) - 1 - len(alone)
        ids = torch.tensor(encoded[0][-CONTEXT:])
        return torch.equal(model.logits(ids[None, :-1])[0, -count:].argmax(-1), ids[-count:])
    from_left = kind == "multiple_choice"
    columns = zip(*(ids if from_left else ids[::-1] for ids in encoded), strict=False)
    shared = len([*itertools.takewhile(lambda column: len({*column}) == 1, columns)])
    counts = [len(ids) - shared if from_left else shared for ids in encoded]
    means = [
        float(log_probabilities(model, ids[-CONTEXT:-count], ids[-count:]).mean())
        if count
        else math.nan
        for ids, count in zip(encoded, counts, strict=True)
    ]
    best = 0
    for choice, mean in enumerate(means):  # nan is not greater
        best = choice if mean > means[best] else best
    return best == rows[i]["gold"]


def read_rows(bundle: Path, name: str) -> list[Row]:
    lines = (bundle / f"eval_data/sub/{name}.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    random.Random(1337).shuffle(rows)
    return rows


@pytest.mark.parametrize(("name", "limit"), [("bytes", 0), ("bpe:290", 0), ("bytes", 12)])
def test_every_example_is_answered_as_by_plain_forwards(bundle: Path, name: str, limit: int):
    tokenizer = make_tokenizer(name)
    model = make_letter_model(tokenizer)
    tasks = read_bundle(bundle, limit)
    loaded = LoadedModel(model, tokenizer, "a model")
    result = evaluate_tasks(loaded, CPU, SINGLE, tasks=tasks, per_example=True)
    assert list(result["tasks"]) == [task[0] for task in TASKS]
    centered = []
    for task in TASKS:
        rows = read_rows(bundle, task[0])[: limit or None]  # few-shot examples are among these
        expected = [is_right(model, tokenizer, task, rows, i) for i in range(len(rows))]
        metrics = result["tasks"][task[0]]
        choice = "pred" if metrics["acc_token_mean"] is None else "pred_token_mean"
        right = [example[choice] == example["gold"] for example in metrics["examples"]]
        assert right == expected
        assert limit or task[0] == "long_words" or 0 < sum(expected) < len(rows)
        accuracy, baseline = sum(expected) / len(rows), task[4] / 100
        centered.append((accuracy - baseline) / (1 - baseline))
        assert metrics["centered"] == pytest.approx(centered[-1])
        assert "n_cut" not in metrics
        untruncated = encode_core_task(tasks[task[0]], tokenizer, 10_000)
        longest = max(example.tree.positions.max() for example in untruncated)
        assert longest > CONTEXT or "long" not in task[0]
    assert result["core"] == pytest.approx(sum(centered) / len(TASKS))


def test_table_ends_with_core(bundle: Path, tmp_path: Path, call: Call):
    tokenizer = make_tokenizer("bytes")
    model = make_letter_model(tokenizer)
    write_hf(tmp_path, model, tokenizer, "fp32")
    line = f"eval {tmp_path} --tasks core --data {bundle} --limit"
    rows = [row.split()[2:] for row in call(f"{line} 7")[1].splitlines()[-7:]]
    assert [row[0] for row in rows] == [*(task[0] for task in TASKS), "core"]
    answer = evaluate(model, tokenizer, tasks="core", data=bundle, limit=7)
    assert float(rows[-1][-1].rstrip("%")) / 100 == pytest.approx(answer["core"], abs=1e-4)
    assert call(f"{line} 5")[0] == ExitCode.CONFIG  # of 5 shots


DAMAGED = {
    "eval_meta_data.csv": "Eval Task,Random baseline\nwords,0",
    "eval_data/sub/words.jsonl": '{"query": "a"}\n',
    "eval_data/sub/schema.jsonl": None,
    "core.yaml": "icl_tasks: [}",
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_bundle(tmp_path: Path, name: str):
    file = write_bundle(tmp_path) / name
    file.unlink()
    if content := DAMAGED[name]:
        file.write_text(content)
    with pytest.raises(DataError):
        read_bundle(tmp_path)
