"""A run handed to lm-evaluation-harness: its own questions, its own sums, our model. Needs the extra `eval`."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatoken.cli import main
from megatoken.data.tokenizer import load_tokenizer
from megatoken.model.gpt import GPT, initialize
from megatoken.presets import Shape
from tests.evaluate.plain import ALONE, CPU, log_probabilities

lm_eval = pytest.importorskip("lm_eval")
pytestmark = pytest.mark.filterwarnings("ignore")  # its own and its dependencies'

from megatoken.harness import Adapter, cut_at  # noqa: E402
from megatoken.interop.weights import Loaded  # noqa: E402

BYTES = load_tokenizer("bytes")
TASKS = {
    "asked": """\
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{gold}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "written": """\
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["\\n", "b"], max_gen_toks: 6, do_sample: false}
metric_list: [{metric: exact_match}]
""",
    "rolled": """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: bits_per_byte}]
""",
}
ROWS = [
    {"question": f"Question {n}: {'why ' * n}", "choices": ["because", f"no {n}", "b"], "gold": n % 3} for n in range(9)
]


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    model = GPT(Shape(n_layer=1, n_head=2, d_model=16, d_ff=32, vocab_size=257, seq_len=32))
    initialize(model, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5.0 if parameter.dim() > 1 else 1.0)
    return Loaded(model.eval(), BYTES, "a model")


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "tasks").mkdir()
    for name, text in TASKS.items():
        head = (
            f'task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: "{data}"}}}}\ntest_split: test\n'
        )
        (tmp_path / "tasks" / f"{name}.yaml").write_text(head + text)
    return tmp_path / "tasks"


def likelihoods(loaded: Loaded, text: str, answer: str) -> float:
    return float(log_probabilities(loaded.model, [*text.encode()], [*answer.encode()]).sum())


def roll(loaded: Loaded, text: str) -> float:
    """The loss of a text in windows of 32, each with as much before it as there is room for."""
    ids, nats = [BYTES.eot, *text.encode()], 0.0
    for start in range(1, len(ids), 32):
        end = min(start + 32, len(ids))
        nats -= float(log_probabilities(loaded.model, ids[max(0, end - 33) : start], ids[start:end]).sum())
    return nats


def test_its_results_are_those_of_the_model(
    loaded: Loaded, tasks: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megatoken.judging.load_weights", lambda name, warn: loaded)
    words = ["eval", "any", "--harness", "--tasks", "asked,written,rolled", "--include", str(tasks), "--examples"]
    assert main([*words, "--device", "cpu", "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    right = 0
    for row in ROWS:
        text = str(row["question"]).rstrip()
        moved = str(row["question"])[len(text) :]
        scores = [likelihoods(loaded, text, f"{moved} {choice}") for choice in row["choices"]]  # type: ignore[union-attr]
        right += scores.index(max(scores)) == row["gold"]
    assert answer["results"]["asked"]["acc,none"] == pytest.approx(right / 9)
    assert {"acc_norm,none", "acc_stderr,none"} <= answer["results"]["asked"].keys()
    nats = sum(roll(loaded, str(row["question"])) for row in ROWS)
    bits = nats / sum(len(str(row["question"])) for row in ROWS) / math.log(2)
    assert answer["results"]["rolled"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-5)
    assert len(answer["samples"]["written"]) == 9
    for sample in answer["samples"]["written"]:
        (said,) = sample["filtered_resps"]
        assert "b" not in said
        assert len(said.encode()) <= 6 * 3
    assert answer["lm_eval"] == lm_eval.__version__


def test_log_likelihoods_in_order_and_whether_they_are_what_it_would_write(loaded: Loaded) -> None:
    adapter = Adapter(loaded, CPU, ALONE)
    texts = [("abc", " def"), ("xyz", " d"), ("abc", " deg"), ("longer than its context " * 3, " end")]
    requests = [(pair, adapter.tok_encode(pair[0]), adapter.tok_encode(pair[1])) for pair in texts]
    answers = adapter._loglikelihood_tokens(requests)
    assert [log_p for log_p, _ in answers] == pytest.approx([likelihoods(loaded, *pair) for pair in texts], rel=1e-5)
    with torch.no_grad():
        next_id = int(loaded.model.logits(loaded.model(torch.tensor([[*b"abc"]])))[0, -1].argmax())
    ((_, greedy),) = adapter._loglikelihood_tokens([(("abc", "?"), [*b"abc"], [next_id])])
    assert greedy
    assert not any(greedy for _, greedy in answers)


def test_text_is_cut_before_the_first_stop() -> None:
    assert cut_at("one two\nthree", ["\n", "two", ""]) == "one "
    assert cut_at("one", ["two"]) == "one"


def test_an_unknown_task_is_one_line(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megatoken.judging.load_weights", lambda name, warn: loaded)
    assert main(["eval", "any", "--harness", "--tasks", "hellaswagg", "--device", "cpu"]) == 2
    assert "error: lm-evaluation-harness knows no task 'hellaswagg' — --tasks" in capsys.readouterr().err
