"""A model's tokenizer, templates and special tokens are the same through every command."""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatoken.base.errors import DataError
from megatoken.convert.export import export
from megatoken.convert.hf.export import write_hf
from megatoken.convert.hf.peft import write_peft
from megatoken.model.gpt import GPT
from megatoken.text.byte_bpe import assemble, byte_vocabulary
from megatoken.text.chat_template import (
    Message,
    add_control_tokens,
    find_stop_ids,
    find_template,
    template_of,
)
from megatoken.text.load_pretrained import load_pretrained
from megatoken.text.tokenizer import Tokenizer, load_tokenizer
from tests.convert.models import FAMILIES, draw_model, save_run

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eom|>", "<|begin|>", "</s>", "<eos>"]
EOT, TAG, EOS = 256, 261, 262
VOCABULARY = byte_vocabulary() | {name: 256 + at for at, name in enumerate(NAMES)}
# Files of a folder; "special": the special tokens if not all NAMES are, none for a vocab.json.
CONFIGS = ("config.json", "generation_config.json")
LAYOUTS = yaml.safe_load("""
no template:
  special: &base [<|endoftext|>, <|eom|>, <|begin|>]
  tokenizer_config.json: {<<: &named {eos_token: <|endoftext|>, bos_token: <|begin|>}, pad_token: <|eom|>}
adds bos:
  special: *base
  tokenizer_config.json: {<<: *named, add_bos_token: true}
text:
  tokenizer_config.json:
    <<: *named
    chat_template: &turn "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
list:
  tokenizer_config.json:
    <<: *named
    chat_template:
    - {name: default, template: *turn}
    - name: tool_use
      template: &tools "{{ bos_token }}{{ tools | length }}\\
        {% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
jinja:
  chat_template.jinja: *turn
  tokenizer_config.json: {eos_token: <|im_end|>}
named:
  chat_template.jinja: *turn
  additional_chat_templates/tool_use.jinja: *tools
  tokenizer_config.json: *named
three ends:
  chat_template.jinja: *turn
  tokenizer_config.json: *named
  config.json: {eos_token_id: [258, 256, 259]}
ends of two files:
  chat_template.jinja: *turn
  config.json: {eos_token_id: 256, bos_token_id: 260}
  generation_config.json: {eos_token_id: [259, 258]}
config:
  special: [<eos>]
  tokenizer_config.json: {eos_token: <eos>}
map:
  special: [<eos>, <|begin|>]
  special_tokens_map.json: {eos_token: {content: <eos>}, bos_token: <|begin|>}
vocabulary:
  special: []
  tokenizer_config.json: {<<: *named, eos_token: </s>, tokenizer_class: GPT2Tokenizer}
  config.json: {eos_token_id: 261, bos_token_id: 260}
""")


def write_files(folder: Path, layout: dict[str, Any]) -> None:
    special = layout.get("special", [name for name in NAMES if name != "</s>"])
    assemble(VOCABULARY, [], special).save(f"{folder}/tokenizer.json")
    if not special:
        (folder / "tokenizer.json").unlink()
        (folder / "vocab.json").write_text(json.dumps(VOCABULARY))
        (folder / "merges.txt").write_text("#version: 0.2\n")
    for name in layout.keys() - {"special"}:
        (folder / name).parent.mkdir(exist_ok=True)
        content = layout[name]
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


def write_model(folder: Path, layout: dict[str, Any]) -> GPT:
    """Write a model folder whose special ids and templates are those of a layout."""
    folder.mkdir()
    model = draw_model(replace(FAMILIES["llama-untied"], vocab_size=len(VOCABULARY)))
    write_hf(folder, model, Tokenizer(assemble(VOCABULARY, []), "it"), "fp32")
    config = json.loads((folder / "config.json").read_text())
    del config["bos_token_id"], config["eos_token_id"]
    for path in folder.glob("*.json"):
        path.unlink()
    write_files(folder, layout | {"config.json": config | layout.get("config.json", {})})
    return model


def write_adapter(folder: Path, layout: dict[str, Any], base: Path) -> None:
    """Write an adapter of the model in `base`, with the tokenizer of a layout."""
    folder.mkdir()
    config = replace(load_pretrained(base).model.config, lora_rank=2, init=str(base))
    write_peft(folder, draw_model(config), "fp32")
    write_files(folder, {name: layout[name] for name in layout if name not in CONFIGS})


def describe(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the ids of a conversation without and with tools, and the special ids."""
    template = template_of(tokenizer)
    chats = []
    for tools in (None, [{}]):
        try:
            chats.append(template and template.encode([Message("user", "a")], tools=tools)[0])
        except DataError:
            chats.append(None)
    ends = {*find_stop_ids(tokenizer)}
    return {"chats": chats, "ends": ends, "bos": tokenizer.bos, "added": tokenizer.bos_ids}


def describe_theirs(folder: Path, layout: dict[str, Any]) -> dict[str, Any]:
    """Return the same of transformers' tokenizer, and of the ids in a layout's config files."""
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert theirs.encode("ab", add_special_tokens=False) == [97, 98]
    chats = []
    for tools in (None, [{}]):
        chat = [{"role": "user", "content": "a"}]
        has_template = theirs.chat_template and (
            not tools or "tools" in theirs.get_chat_template(None, tools)
        )
        encode = partial(theirs.apply_chat_template, chat, return_dict=False)
        chats.append(encode(tools=tools) if has_template else None)
    configs = [layout.get(name, {}) for name in CONFIGS]
    ends = [config.get("eos_token_id", []) for config in configs]
    ends = {id for each in ends for id in (each if isinstance(each, list) else [each])}
    named = (config.get("bos_token_id") for config in configs)
    separator = EOS if theirs.eos_token_id == EOS else EOT
    bos_ids = [theirs.bos_token_id, *named, separator]
    return {
        "chats": chats,
        "ends": ends | {theirs.eos_token_id} - {None},
        "bos": next(id for id in bos_ids if id is not None),
        "added": theirs.encode("a")[:-1],
    }


def describe_gguf(path: Path) -> dict[str, Any]:
    fields = gguf.GGUFReader(path).fields
    contents = {name.removeprefix("tokenizer."): fields[name].contents() for name in fields}
    return {
        "templates": [
            contents[name] for name in sorted(contents) if re.search("template($|[.])", name)
        ],
        "ends": {contents.get(f"ggml.{name}_token_id") for name in ("eos", "eot", "eom")} - {None},
        "bos": contents["ggml.bos_token_id"],
        "added": contents["ggml.add_bos_token"],
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_door_finds_the_same(name: str, tmp_path: Path):
    layout, folder = LAYOUTS[name], tmp_path / "folder"
    model = write_model(folder, layout)
    expected = describe_theirs(folder, layout)
    tokenizer = load_tokenizer(str(folder))
    assert describe(tokenizer) == expected
    eos = transformers.AutoTokenizer.from_pretrained(folder).eos_token_id
    assert tokenizer.eot == (eos if eos in (TAG, EOS) else EOT)
    loaded = load_pretrained(folder)
    assert describe(loaded.tokenizer) == expected
    if tokenizer.templates:
        ends = expected["ends"] | {*find_template(tokenizer).stop_ids}
        assert describe(add_control_tokens(tokenizer)) == expected | {"ends": ends}
    save_run(tmp_path / "run", model, tokenizer)
    assert describe(load_pretrained(tmp_path / "run").tokenizer) == expected
    assert describe(load_tokenizer(f"{tmp_path}/run")) == expected
    for source in (folder, tmp_path / "run"):
        out = tmp_path / f"hf of {source.name}"
        assert export(source, "hf", out)["verified"]
        assert describe(load_pretrained(out).tokenizer) == expected
        ids = json.loads((out / "generation_config.json").read_text())
        assert describe_theirs(out, {"config.json": ids}) == expected
        export(source, "gguf", tmp_path / f"{source.name}.gguf")
        assert describe_gguf(tmp_path / f"{source.name}.gguf") == {
            "templates": [*tokenizer.templates.values()],
            **{key: expected[key] for key in ("ends", "bos")},
            "added": bool(expected["added"]),
        }
    write_adapter(tmp_path / "adapter", layout, folder)
    found = load_pretrained(tmp_path / "adapter").tokenizer
    assert describe(found) == describe_theirs(tmp_path / "adapter", layout)
