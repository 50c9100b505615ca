"""`megatoken reproduce`: published losses and scores against those measured here."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatoken.base.errors import ExitCode
from megatoken.base.published import MODELS, RUNS
from megatoken.convert.hf.export import write_hf
from megatoken.data.dataset import load_dataset
from megatoken.study.commands import reproduce
from megatoken.text.tokenizer import load_tokenizer
from tests.conftest import Call
from tests.convert.models import draw_model
from tests.tiny_run import write_jsonl

TINY = "model.n_layer=1 model.n_head=2 model.d_model=16 machine.micro_batch=4"


@pytest.fixture
def text(real_data: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return tiny Shakespeare, and let GPT-2's vocabulary be found without a download."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", f"{real_data}/tiktoken")
    return real_data / "tinyshakespeare.txt"


def replay(call: Call, arguments: str) -> tuple[int, dict[str, Any]]:
    code, out, _ = call(f"reproduce {arguments} --json")
    return code, json.loads(out.splitlines()[-1])


@pytest.mark.parametrize("name", RUNS)
def test_every_run_has_a_valid_config(name: str):
    published = RUNS[name]
    config = reproduce.resolve_run(published, []).config
    assert config.total_steps(epoch_tokens=1 << 30) == len(published.losses)
    assert config.data.order != "shuffled"


# The other runs and steps are records/reproduce-*.json.
SETTINGS = {"": ExitCode.DONE, TINY: ExitCode.NUMERICS}


@pytest.mark.long
@pytest.mark.parametrize("settings", SETTINGS)
def test_first_steps_of_a_published_run(settings: str, text: Path, tmp_path: Path, call: Call):
    """GPT-2 124M is within the tolerance; a tiny model, which does not learn as fast, is not."""
    picture, published = tmp_path / "overlay.png", RUNS["notebook-fifty"]
    arguments = f"budget.steps=2 {settings} --data {text} --out {tmp_path}/run --plot {picture}"
    code, result = replay(call, f"notebook-fifty {arguments}")
    assert (code, result["reproduced"]) == (SETTINGS[settings], not settings)
    assert result["published"] == published.losses[:2]
    worst = max(np.subtract(result["losses"], result["published"]), key=abs)
    assert result["largest_difference"] == pytest.approx(worst)
    assert (abs(worst) < published.tolerance) == result["reproduced"]
    assert picture.stat().st_size > 10_000


def test_documents_are_separated_as_in_llmc(text: Path, tmp_path: Path):
    """llm.c's script writes 338,028 tokens, an end-of-text token before each paragraph."""
    folder = reproduce.write_text(tmp_path / "documents", text, has_documents=True)
    tokens = load_dataset(folder).train
    assert len(tokens) == reproduce.COPIES * (305_260 + 32_768)
    assert tokens.read(0, 4).tolist() == [50256, 5962, 22307, 25]


def test_scores_are_compared_in_their_columns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, call: Call
):
    write_hf(tmp_path, draw_model(), load_tokenizer("bytes"), "fp32")
    rows = [
        {"activity_label": "A", "ctx": f"{n} of", "endings": ["a", "b", "cc", "d"], "label": n % 4}
        for n in range(20)
    ]
    examples = write_jsonl(tmp_path / "hellaswag.jsonl", rows)
    model = {"name": "GPT-2 124M", "weights": str(tmp_path)}
    monkeypatch.setitem(MODELS, "hellaswag-124m", model)
    code, result = replay(call, f"hellaswag-124m --data {examples}")
    published = {"acc": 0.2892, "acc_norm": 0.3114, "acc_token_mean": 0.2955}
    worst = max(abs(result["scores"][kind] - value) for kind, value in published.items())
    assert result["largest_difference"] == pytest.approx(worst)
    assert (code, result["reproduced"]) == (ExitCode.NUMERICS, False)
