"""Exported chat models have the same ids, stop tokens and answers in transformers."""

import json
from dataclasses import replace
from pathlib import Path

import jinja2
import pytest
import tokenizers
import torch

from megatoken.convert.export import export
from megatoken.convert.hf import export as hf_export
from megatoken.convert.load_pretrained import LoadedModel, load_pretrained
from megatoken.data.chat_template import Message, add_control_tokens, find_stop_ids, find_template
from megatoken.data.tokenizer import Tokenizer
from megatoken.errors import CheckpointError
from megatoken.model.gpt import GPT
from megatoken.sampling.choose import Sampling
from megatoken.sampling.generate import generate, generate_ids
from tests.convert.models import FAMILIES, byte_tokenizer, draw_model

transformers = pytest.importorskip("transformers")

TEMPLATE = find_template(add_control_tokens(byte_tokenizer()))
CHAT = [
    Message("system", "Be brief."),
    Message("user", "2 + 2?"),
    Message("assistant", "4"),
    Message("user", "né?\n"),
]
ROWS = [{"role": message.role, "content": message.content} for message in CHAT]


def draw_chat_model(family: str) -> GPT:
    return draw_model(
        replace(FAMILIES[family], vocab_size=TEMPLATE.tokenizer.vocab_size, seq_len=128)
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an export whose head is permuted so that the third greedy token ends the answer."""
    model = draw_chat_model("llama-untied")
    ids = generate_ids(
        model, TEMPLATE.encode(CHAT, reply=True)[0], Sampling(max_new_tokens=3, temperature=0)
    )[0]
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
    assert ids == TEMPLATE.encode(CHAT, reply=True)[0]
    assert tokenizer.eos_token_id == TEMPLATE.stop_ids[0]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert theirs.generation_config.eos_token_id == list(TEMPLATE.stop_ids)
    answer = theirs.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False)[
        0, len(ids) :
    ].tolist()
    loaded = load_pretrained(folder)
    again = find_template(loaded.tokenizer)
    assert (again.stop_ids, again.jinja) == (TEMPLATE.stop_ids, TEMPLATE.jinja)
    assert find_stop_ids(loaded.tokenizer) == find_stop_ids(TEMPLATE.tokenizer) == TEMPLATE.stop_ids
    ours = generate_ids(
        loaded.model, ids, Sampling(max_new_tokens=16, temperature=0, stop_ids=TEMPLATE.stop_ids)
    )[0]
    assert answer == [*ours, TEMPLATE.stop_ids[0]]
    assert len(ours) == 2


def test_generation_ends_where_the_model_says(tmp_path: Path):
    """It ends at one of several ids, none of which is named an end of text; exports keep them."""
    inner = tokenizers.Tokenizer.from_str(
        byte_tokenizer().to_json().replace("<|endoftext|>", "<end>")
    )
    model = draw_model(FAMILIES["llama-untied"])
    free = generate_ids(model, [*b"abc"], Sampling(max_new_tokens=9, temperature=0))[0]
    export(LoadedModel(model, Tokenizer(inner, "it", 256), "it"), "hf", tmp_path / "hf")
    for name, ends in (("config.json", 256), ("generation_config.json", [256, free[3]])):
        content = json.loads((tmp_path / "hf" / name).read_text())
        (tmp_path / "hf" / name).write_text(json.dumps(content | {"eos_token_id": ends}))
    loaded = load_pretrained(tmp_path / "hf")
    text = generate(loaded.model, loaded.tokenizer, "abc", max_new_tokens=9, temperature=0)
    assert text == loaded.tokenizer.decode(free[: free.index(free[3])])
    assert loaded.tokenizer.eot == 256
    export(loaded, "hf", tmp_path / "again")
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "again" / name).read_text())["eos_token_id"] == [256, free[3]]


def test_the_template_is_plain_jinja_and_the_marked_one_gives_masks(folder: Path):
    written = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    plain = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(written)
    text = plain.render(messages=ROWS, add_generation_prompt=True)
    assert text == TEMPLATE.tokenizer.decode(TEMPLATE.encode(CHAT, reply=True)[0])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    marked = (folder / "chat_template_training.jinja").read_text()
    encoded = tokenizer.apply_chat_template(
        ROWS, chat_template=marked, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, trained = TEMPLATE.encode(CHAT)
    assert encoded["input_ids"] == ids
    assert encoded["assistant_masks"] == trained


def test_a_template_that_writes_other_ids_is_not_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(hf_export, "drop_marks", lambda _: "{{ messages[0]['content'] }}")
    loaded = LoadedModel(draw_chat_model("gpt2"), TEMPLATE.tokenizer, "it")
    with pytest.raises(CheckpointError):
        export(loaded, "hf", tmp_path / "hf")
    assert list(tmp_path.iterdir()) == []
