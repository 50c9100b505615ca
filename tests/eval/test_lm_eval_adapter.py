"""lm-evaluation-harness on a loaded model. Needs the extra `eval`."""

import json
import math
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatoken.cli.main import main
from megatoken.data.chat_template import Message, add_control_tokens, find_template
from megatoken.data.tokenizer import load_tokenizer
from tests.eval.reference_scorer import CPU, SINGLE, log_probabilities, make_model, write_jsonl

lm_eval = pytest.importorskip("lm_eval")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the harness and its dependencies

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402

from megatoken.console import Console  # noqa: E402
from megatoken.convert.export import export  # noqa: E402
from megatoken.convert.load_pretrained import LoadedModel  # noqa: E402
from megatoken.errors import ConfigError  # noqa: E402
from megatoken.eval.lm_eval_adapter import Adapter, run_harness  # noqa: E402

BYTES = load_tokenizer("bytes")
TASKS = {
    "choice": """\
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{gold}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "generated": """\
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["\\n", "b"], max_gen_toks: 6, do_sample: false}
metric_list: [{metric: exact_match}]
""",
    "rolling": """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: bits_per_byte}]
""",
}
ROWS = [
    {
        "question": f"Question {n}: {'why ' * n}",
        "choices": ["because", f"no {n}", "b"],
        "gold": n % 3,
    }
    for n in range(9)
]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return LoadedModel(make_model(seq_len=32, n_layer=1).eval(), BYTES, "a model")


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    data = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "tasks").mkdir()
    for name, text in TASKS.items():
        head = f'task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: "{data}"}}}}\ntest_split: test\n'
        (tmp_path / "tasks" / f"{name}.yaml").write_text(head + text)
    return tmp_path / "tasks"


def log_likelihood(loaded: LoadedModel, text: str, continuation: str) -> float:
    return float(log_probabilities(loaded.model, [*text.encode()], [*continuation.encode()]).sum())


def rolling_loss(loaded: LoadedModel, text: str) -> float:
    """The loss of a text in windows of 32, each after as much context as fits."""
    ids, nats = [BYTES.eot, *text.encode()], 0.0
    for start in range(1, len(ids), 32):
        end = min(start + 32, len(ids))
        nats -= float(
            log_probabilities(loaded.model, ids[max(0, end - 33) : start], ids[start:end]).sum()
        )
    return nats


def test_results_equal_those_of_the_model(
    loaded: LoadedModel,
    tasks: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        "megatoken.convert.load_pretrained.load_pretrained", lambda name, warn: loaded
    )
    arguments = [
        "eval",
        "any",
        "--harness",
        "--tasks",
        "choice,generated,rolling",
        "--include",
        str(tasks),
        "--examples",
    ]
    assert main([*arguments, "--device", "cpu", "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    correct = 0
    for row in ROWS:
        text = str(row["question"]).rstrip()
        spaces = str(row["question"])[len(text) :]
        scores = [log_likelihood(loaded, text, f"{spaces} {choice}") for choice in row["choices"]]  # type: ignore[union-attr]
        correct += scores.index(max(scores)) == row["gold"]
    assert result["results"]["choice"]["acc,none"] == pytest.approx(correct / 9)
    assert {"acc_norm,none", "acc_stderr,none"} <= result["results"]["choice"].keys()
    nats = sum(rolling_loss(loaded, str(row["question"])) for row in ROWS)
    bits = nats / sum(len(str(row["question"])) for row in ROWS) / math.log(2)
    assert result["results"]["rolling"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-5)
    assert len(result["samples"]["generated"]) == 9
    for sample in result["samples"]["generated"]:
        (text,) = sample["filtered_resps"]
        assert "b" not in text
        assert len(text.encode()) <= 6 * 3
    assert result["lm_eval"] == lm_eval.__version__


def test_log_likelihoods_are_in_order_with_greedy_flags(loaded: LoadedModel) -> None:
    adapter = Adapter(loaded.model, loaded.tokenizer, CPU, SINGLE)
    texts = [
        ("abc", " def"),
        ("xyz", " d"),
        ("abc", " deg"),
        ("longer than the context " * 3, " end"),
    ]
    requests = [(pair, adapter.tok_encode(pair[0]), adapter.tok_encode(pair[1])) for pair in texts]
    results = adapter._loglikelihood_tokens(requests)
    assert [log_p for log_p, _ in results] == pytest.approx(
        [log_likelihood(loaded, *pair) for pair in texts], rel=1e-5
    )
    with torch.no_grad():
        next_id = int(loaded.model.logits(torch.tensor([[*b"abc"]]))[0, -1].argmax())
    ((_, greedy),) = adapter._loglikelihood_tokens([(("abc", "?"), [*b"abc"], [next_id])])
    assert greedy
    assert not any(greedy for _, greedy in results)


def test_generated_texts_equal_those_of_the_harness_own_model(tmp_path: Path) -> None:
    """Prompts longer than the context, stop strings, an end of text, and no room for a prompt."""
    model = make_model(seq_len=48, n_layer=1).eval()
    export(LoadedModel(model, BYTES, "a model"), "hf", tmp_path / "hf")
    theirs = HFLM(pretrained=str(tmp_path / "hf"), device="cpu", batch_size=1, dtype="float32")
    ours = Adapter(model, BYTES, CPU, SINGLE)
    prompts = [str(row["question"]) for row in ROWS]

    def ask(settings: dict[str, Any]) -> list[list[str]]:
        rows = [Instance("generate_until", {}, (prompt, settings), 0) for prompt in prompts]
        return [each.generate_until(rows) for each in (ours, theirs)]

    found, expected = ask({"max_gen_toks": 30})
    assert found == expected
    stops = [text[3:5] for text in expected[:3]]
    for settings in (
        {"until": stops, "max_new_tokens": 20},
        {"until": expected[0][7], "max_gen_toks": 47},
    ):
        found, expected = ask(settings)
        assert found == expected
    for adapter, error in ((ours, ConfigError), (theirs, AssertionError)):
        with pytest.raises(error, match=r"256.*48"):
            adapter.generate_until([Instance("generate_until", {}, ("a", {}), 0)])


def test_unknown_task_is_a_one_line_error(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "megatoken.convert.load_pretrained.load_pretrained", lambda name, warn: loaded
    )
    assert main(["eval", "any", "--harness", "--tasks", "hellaswagg", "--device", "cpu"]) == 2
    assert (
        "error: lm-evaluation-harness knows no task 'hellaswagg' — --tasks"
        in capsys.readouterr().err
    )


CHAT = find_template(add_control_tokens(BYTES))


def test_a_conversation_has_the_ids_of_the_template() -> None:
    adapter = Adapter(make_model(seq_len=32, n_layer=1), CHAT.tokenizer, CPU, SINGLE, CHAT)
    rows = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "né <|im_end|>\n\ufdd0<|im_start|>system"},
        {"role": "assistant", "content": " yes"},
        {"role": "user", "content": "?"},
    ]
    said = [Message(row["role"], row["content"].replace("\ufdd0", "")) for row in rows]
    text = adapter.apply_chat_template(rows)
    assert adapter.tok_encode(text) == CHAT.encode(said, reply=True)[0]
    begun = adapter.apply_chat_template(
        [*rows, {"role": "assistant", "content": "It is"}], add_generation_prompt=False
    )
    assert begun == text + "It is"
    assert adapter.chat_template(True) == CHAT.jinja


def test_a_chat_model_is_asked_by_its_template(
    tasks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model(seq_len=128, n_layer=1, vocab_size=CHAT.tokenizer.vocab_size).eval()
    options = Namespace(
        tasks="choice,generated", include=tasks, limit=0, fewshot=None, examples=True, json=True
    )
    for no_template in (False, True):
        options.no_template = no_template
        loaded = LoadedModel(model, CHAT.tokenizer, "a model")
        answer = run_harness(options, loaded, CPU, SINGLE, Console(to_stderr=True))
        assert answer["chat_template"] == (None if no_template else "chatml")
        assert ("by the model's chat template chatml" in capsys.readouterr().err) == (
            not no_template
        )
        for row, sample in zip(
            [] if no_template else ROWS, answer["samples"]["choice"], strict=False
        ):
            ids, _ = CHAT.encode([Message("user", str(row["question"]))], reply=True)
            for choice, found in zip(row["choices"], sample["filtered_resps"], strict=True):
                # The harness counts the white space before a choice as its own: here the header's last line end.
                expected = float(
                    log_probabilities(model, ids[:-1], [*f"\n{choice}".encode()]).sum()
                )
                assert float(found[0]) == pytest.approx(expected, abs=1e-4)
