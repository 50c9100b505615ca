"""Exported chat models have the same ids, stop tokens and answers in transformers."""

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch

from megatoken.base.errors import CheckpointError
from megatoken.convert.export import export
from megatoken.convert.hf import export as hf_export
from megatoken.inference.generate import generate_ids
from megatoken.inference.sampling import Sampling
from megatoken.model.gpt import GPT
from megatoken.text.chat_template import Message, find_stop_ids, find_template
from megatoken.text.load_pretrained import LoadedModel, load_pretrained
from tests.convert.models import TEMPLATE, draw_chat_model

transformers = pytest.importorskip("transformers")

TURNS = [("system", "Be brief."), ("user", "2 + 2?"), ("assistant", "4"), ("user", "né?\n")]
CHAT = [Message(*turn) for turn in TURNS]
ROWS = [{"role": role, "content": content} for role, content in TURNS]
IDS = TEMPLATE.encode(CHAT, reply=True)[0]


def greedy(model: GPT, ids: list[int], max_new_tokens: int, **options: Any) -> list[int]:
    return generate_ids(model, ids, Sampling(max_new_tokens, 0, **options))[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an export whose head is permuted so that the third greedy token ends the answer."""
    model = draw_chat_model()
    ids = greedy(model, IDS, 3)
    assert ids[2] not in (*ids[:2], *TEMPLATE.stop_ids)
    rows = [ids[2], TEMPLATE.stop_ids[0]]
    with torch.no_grad():
        model.lm_head_weight[rows] = model.lm_head_weight[rows[::-1]]
    out = tmp_path_factory.mktemp("export") / "hf"
    assert export(LoadedModel(model, TEMPLATE.tokenizer, "it"), "hf", out)["verified"]
    return out


def test_ids_ends_and_greedy_answers_are_the_same(folder: Path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(ROWS, add_generation_prompt=True, return_dict=False)
    assert ids == IDS
    assert tokenizer.eos_token_id == TEMPLATE.stop_ids[0]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert theirs.generation_config.eos_token_id == list(TEMPLATE.stop_ids)
    generated = theirs.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False)
    loaded = load_pretrained(folder)
    again = find_template(loaded.tokenizer)
    assert (again.stop_ids, again.jinja) == (TEMPLATE.stop_ids, TEMPLATE.jinja)
    assert find_stop_ids(loaded.tokenizer) == find_stop_ids(TEMPLATE.tokenizer) == TEMPLATE.stop_ids
    ours = greedy(loaded.model, ids, 16, stop_ids=TEMPLATE.stop_ids)
    assert generated[0].tolist() == [*ids, *ours, TEMPLATE.stop_ids[0]]
    assert len(ours) == 2


def test_the_template_is_plain_jinja_and_the_marked_one_gives_masks(folder: Path):
    written = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    plain = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(written)
    text = plain.render(messages=ROWS, add_generation_prompt=True)
    assert text == TEMPLATE.tokenizer.decode(IDS)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    marked = (folder / "chat_template_training.jinja").read_text()
    encoded = tokenizer.apply_chat_template(
        ROWS, chat_template=marked, return_dict=True, return_assistant_tokens_mask=True
    )
    assert (encoded["input_ids"], encoded["assistant_masks"]) == TEMPLATE.encode(CHAT)


def test_a_template_that_writes_other_ids_is_not_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(hf_export, "drop_generation_tags", lambda _: "{{ messages[0]['content'] }}")
    loaded = LoadedModel(draw_chat_model(family="gpt2"), TEMPLATE.tokenizer, "it")
    with pytest.raises(CheckpointError):
        export(loaded, "hf", tmp_path / "hf")
    assert list(tmp_path.iterdir()) == []
