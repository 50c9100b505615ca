"""`megatoken reproduce`: published losses and scores against those measured here."""

import json
from pathlib import Path

import pytest

from megatoken.cli import reproduce
from megatoken.cli.main import main
from megatoken.convert.hf.export import write_hf
from megatoken.data.dataset import load_dataset
from megatoken.data.tokenizer import load_tokenizer
from megatoken.errors import ExitCode
from megatoken.published import LADDER, MODELS, RUNS, SCORES, SOURCES
from megatoken.system.gpus import GPUS
from tests.convert.models import draw_model

TINY = ["model.n_layer=1", "model.n_head=2", "model.d_model=16", "machine.micro_batch=4"]


@pytest.fixture
def text(real_data: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return tiny Shakespeare, and let GPT-2's vocabulary be found without a download."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(real_data / "tiktoken"))
    return real_data / "tinyshakespeare.txt"


def replay(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict]:
    code = main(["reproduce", *words, "--json"])
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_published_facts_are_complete():
    assert {each.source for each in (*LADDER, *SCORES, *RUNS.values())} == SOURCES.keys()
    assert {each.device for each in LADDER if "laptop" not in each.device} < GPUS.keys()
    assert {each["name"] for each in MODELS.values()} < {each.model for each in SCORES}
    assert all(len(run.losses) == 50 for name, run in RUNS.items() if name.startswith("notebook"))


@pytest.mark.parametrize("name", RUNS)
def test_every_run_has_a_valid_config(name: str):
    published = RUNS[name]
    config = reproduce.resolve_run(published, []).config
    assert config.total_steps(epoch_tokens=1 << 30) == len(published.losses)
    assert config.data.order != "shuffled"


def test_a_published_run_is_reproduced(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """The first steps of GPT-2 124M; the other runs and steps are records/reproduce-*.json."""
    picture = tmp_path / "overlay.png"
    code, answer = replay(
        capsys,
        *("notebook-fifty", "budget.steps=8", "--data", str(text), "--out", str(tmp_path / "run")),
        *("--plot", str(picture)),
    )
    assert code == ExitCode.DONE
    assert answer["published"] == RUNS["notebook-fifty"].losses[:8]
    assert len(answer["losses"]) == 8
    assert abs(answer["largest_difference"]) < RUNS["notebook-fifty"].tolerance
    assert answer["losses"][-1] < answer["losses"][0] - 1.5
    assert picture.stat().st_size > 10_000


def test_a_loss_beyond_the_tolerance_is_an_exit_code(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = ["--data", str(text), "--out", str(tmp_path / "run")]
    code, answer = replay(capsys, "notebook-fifty", *TINY, *words)
    published = RUNS["notebook-fifty"].losses
    worst = max((a - b for a, b in zip(answer["losses"], published, strict=True)), key=abs)
    assert (code, answer["reproduced"]) == (ExitCode.NUMERICS, False)
    assert answer["largest_difference"] == pytest.approx(worst)


def test_documents_are_separated_as_in_llmc(text: Path, tmp_path: Path):
    """llm.c's script writes 338,028 tokens, an end-of-text token before each paragraph."""
    folder = reproduce.write_text(tmp_path / "documents", text, has_documents=True)
    tokens = load_dataset(folder).train
    assert len(tokens) == reproduce.COPIES * (305_260 + 32_768)
    assert tokens.read(0, 4).tolist() == [50256, 5962, 22307, 25]


def test_scores_are_compared_in_their_columns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    weights = str(tmp_path / "weights")
    Path(weights).mkdir()
    write_hf(Path(weights), draw_model(), load_tokenizer("bytes"), "fp32")
    rows = [
        {"activity_label": "A", "ctx": f"{n} of", "endings": ["a", "b", "cc", "d"], "label": n % 4}
        for n in range(20)
    ]
    examples = tmp_path / "hellaswag.jsonl"
    examples.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    monkeypatch.setitem(MODELS, "hellaswag-124m", {"name": "GPT-2 124M", "weights": weights})
    code, answer = replay(capsys, "hellaswag-124m", "--data", str(examples))
    ours = answer["scores"]
    published = {"acc": 0.2892, "acc_norm": 0.3114, "acc_token_mean": 0.2955}
    worst = max(abs(ours[kind] - value) for kind, value in published.items())
    assert answer["largest_difference"] == pytest.approx(worst)
    assert (code, answer["reproduced"]) == (ExitCode.NUMERICS, False)
