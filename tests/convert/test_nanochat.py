"""nanochat's checkpoints give the logits of its architecture, and its tokenizer's ids."""

import json
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor

from megatoken.base.errors import CheckpointError
from megatoken.store.pretrained import read_architecture
from megatoken.text.chat_template import Message, find_template
from megatoken.text.load_pretrained import load_pretrained
from megatoken.text.tokenizer import load_tokenizer
from tests.tables import read_table
from tests.tiny_model import draw

tiktoken = pytest.importorskip("tiktoken")

SIZES = dict(sequence_len=300, vocab_size=280, n_layer=3, n_head=4, n_kv_head=2, n_embd=32)
# Rotary base, factor of queries and keys, largest gate, window, channels of the gates, whether smeared.
VERSIONS = yaml.safe_load("""
"2025": [1.0e+4, 1, 0, 0, 0, false]
January 11: [1.0e+4, 1, 0, 150, 0, false]
January 16: [1.0e+4, 1, 2, 150, 32, false]
March 9: [1.0e+5, 1.15, 3, 128, 12, false]
March 14: [1.0e+5, 1.2, 3, 128, 12, true]
""")
WORDS = (b"th", b"the", b" the", b"in", b"ing", b"wo", b"  ", b"\n\n", b"12", "\u00e9".encode())
SPECIAL = ["<|bos|>"]
for role in ("user", "assistant", "python", "output"):
    SPECIAL += [f"<|{role}_start|>", f"<|{role}_end|>"]
PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)


# Rows of a vocabulary of 280, padded to a multiple of 64.
SHAPES = """
transformer.wte.weight 320 32
transformer.h.LAYER.attn.c_q.weight 32 32
transformer.h.LAYER.attn.c_k.weight 16 32
transformer.h.LAYER.attn.c_v.weight 16 32
transformer.h.LAYER.attn.c_proj.weight 32 32
transformer.h.LAYER.mlp.c_fc.weight 128 32
transformer.h.LAYER.mlp.c_proj.weight 32 128
lm_head.weight 320 32
"""
LAMBDAS = "resid_lambdas 3\nx0_lambdas 3\n"
VALUE_EMBEDDINGS = """\
value_embeds.0.weight 320 16
value_embeds.2.weight 320 16
transformer.h.0.attn.ve_gate.weight 2 CHANNELS
transformer.h.2.attn.ve_gate.weight 2 CHANNELS
"""
SMEARED = "smear_gate.weight 1 24\nsmear_lambda 1\nbackout_lambda 1\n"


def make_state(version: str = "2025") -> dict[str, Tensor]:
    _, _, _, _, channels, smeared = VERSIONS[version]
    table = SHAPES + LAMBDAS * (version != "2025") + SMEARED * smeared
    table += VALUE_EMBEDDINGS.replace("CHANNELS", str(channels)) * (channels > 0)
    tables = [read_table(table.replace("LAYER", str(layer))) for layer in range(3)]
    state = {}
    for seed, (name, sizes) in enumerate((tables[0] | tables[1] | tables[2]).items()):
        shape = [*map(int, sizes.split())]
        state[name] = draw(*shape, seed=seed) * 0.3 + (len(shape) == 1)
    return state


def make_encoding() -> Any:
    tokens = [bytes([byte]) for byte in range(256)] + list(WORDS)
    return tiktoken.Encoding(
        "rustbpe",
        pat_str=PATTERN,
        mergeable_ranks={token: rank for rank, token in enumerate(tokens)},
        special_tokens={name: len(tokens) + i for i, name in enumerate(SPECIAL)},
    )


def write_nanochat(folder: Path, state: dict[str, Tensor], **fields: Any) -> Path:
    """Write a base folder of nanochat; return the folder of the checkpoint."""
    checkpoint = folder / "base_checkpoints/d2"
    checkpoint.mkdir(parents=True)
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer/tokenizer.pkl").write_bytes(pickle.dumps(make_encoding()))
    for step in (9, 10):
        torch.save(state, checkpoint / f"model_{step:06d}.pt")
        meta = {"step": step, "model_config": SIZES | fields}
        (checkpoint / f"meta_{step:06d}.json").write_text(json.dumps(meta))
        state = {name: tensor + 0.01 for name, tensor in state.items()}
    return checkpoint


def forward(state: dict[str, Tensor], ids: Tensor, version: str) -> Tensor:
    """Return the logits of one sequence, head by head."""
    base, scale, largest_gate, window, channels, smeared = VERSIONS[version]
    distance = torch.arange(len(ids))[:, None] - torch.arange(len(ids))

    def norm(x):
        return x / (x.pow(2).mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt()

    def rotate(x):
        """Rotate each pair of channels by minus its angle."""
        pairs = torch.complex(x[:, :4], x[:, 4:])
        angles = torch.arange(len(x))[:, None] / base ** (torch.arange(4) / 4)
        pairs = pairs * torch.exp(-1j * angles)
        return torch.cat([pairs.real, pairs.imag], -1)

    x = norm(state["transformer.wte.weight"][ids])
    if smeared:
        gates = state["smear_lambda"] * (x[1:, :24] @ state["smear_gate.weight"].T).sigmoid()
        x = torch.cat([x[:1], x[1:] + gates * x[:-1]])
    x0 = middle = x
    for layer in range(3):
        if "resid_lambdas" in state:
            x = state["resid_lambdas"][layer] * x + state["x0_lambdas"][layer] * x0
        block = f"transformer.h.{layer}."
        q, k, v = (
            (norm(x) @ state[f"{block}attn.c_{part}.weight"].T).split(8, -1) for part in "qkv"
        )
        if channels and layer != 1:
            gate = state[f"{block}attn.ve_gate.weight"]
            gates = largest_gate * (norm(x)[:, :channels] @ gate.T).sigmoid()
            values = state[f"value_embeds.{layer}.weight"][ids].split(8, -1)
            v = [each + gates[:, [i]] * values[i] for i, each in enumerate(v)]
        hidden = distance < 0
        if window and layer == 0:
            hidden = hidden | (distance > window)
        heads = []
        for head in range(4):
            scores = norm(rotate(q[head])) @ norm(rotate(k[head // 2])).T / 8**0.5
            scores = (scale**2 * scores).masked_fill(hidden, -torch.inf)
            heads.append(scores.softmax(-1) @ v[head // 2])
        x = x + torch.cat(heads, -1) @ state[f"{block}attn.c_proj.weight"].T
        up = norm(x) @ state[f"{block}mlp.c_fc.weight"].T
        x = x + F.relu(up).square() @ state[f"{block}mlp.c_proj.weight"].T
        middle = x if layer == 1 else middle
    if smeared:
        x = x - state["backout_lambda"] * middle
    logits = (norm(x) @ state["lm_head.weight"].T)[:, : SIZES["vocab_size"]]
    return 15 * torch.tanh(logits / 15)


@pytest.mark.parametrize("version", VERSIONS)
def test_logits_equal_the_architecture(tmp_path: Path, version: str):
    state = make_state(version)
    fields = {"window_pattern": "SL"} if version != "2025" else {}
    folder = write_nanochat(
        tmp_path, {f"_orig_mod.{name}": state[name] for name in state}, **fields
    )
    ids = torch.randint(0, 280, (300,), generator=torch.Generator().manual_seed(1))
    older = load_pretrained(folder / "model_000009.pt").model.eval()
    newest = load_pretrained(folder).model.eval()
    with torch.no_grad():
        for model in (older, newest):
            expected = forward(state, ids, version)
            torch.testing.assert_close(model.logits(ids[None])[0], expected, rtol=0, atol=2e-5)
            state = {name: tensor + 0.01 for name, tensor in state.items()}
    assert read_architecture(folder) == older.config
    assert older.config.seq_len == 300


def test_ids_equal_tiktoken(tmp_path: Path):
    encoding = make_encoding()
    folder = write_nanochat(tmp_path, make_state())
    tokenizer = load_pretrained(folder).tokenizer
    rng = random.Random(0)
    parts = [*"thewoing 129\n\t'.!\r", "'LL", "'S", "é", "日本", "\u017f", " the", "<|bos|>", "   "]
    for _ in range(300):
        text = "".join(rng.choices(parts, k=rng.randint(0, 30)))
        assert tokenizer.encode(text).tolist() == encoding.encode_ordinary(text), repr(text)
        assert tokenizer.decode(encoding.encode_ordinary(text)) == text
    assert (tokenizer.vocab_size, tokenizer.eot, tokenizer.bos_ids) == (275, 266, [266])
    assert load_tokenizer(f"{tmp_path}/tokenizer").fingerprint == tokenizer.fingerprint


def test_conversation_is_rendered_as_in_nanochat(tmp_path: Path):
    encoding = make_encoding()
    template = find_template(load_pretrained(write_nanochat(tmp_path, make_state())).tokenizer)
    rows = [("system", "the"), ("user", "in <|bos|>"), ("assistant", "wo"), ("user", "12")]
    ids, trained = template.encode([Message(*row) for row in rows], reply=True)
    bos, user, user_end, assistant, assistant_end = range(266, 271)
    answer = [*encoding.encode_ordinary("wo"), assistant_end]
    head = [bos, user, *encoding.encode_ordinary("the\n\nin <|bos|>"), user_end, assistant]
    tail = [user, *encoding.encode_ordinary("12"), user_end, assistant]
    assert ids == [*head, *answer, *tail]
    assert trained == [False] * len(head) + [True] * len(answer) + [False] * len(tail)
    assert template.stop_ids == (assistant_end, bos)


def test_other_versions_and_missing_meta_are_named(tmp_path: Path):
    for name in ("value_embed.weight", "transformer.h.1.attn.ve_gate.weight"):
        folder = write_nanochat(tmp_path / name, make_state() | {name: torch.zeros(2, 12)})
        with pytest.raises(CheckpointError, match=name.removeprefix("transformer.h.1.attn.")):
            load_pretrained(folder)
    folder = write_nanochat(tmp_path, make_state(), n_experts=8)
    with pytest.raises(CheckpointError, match="n_experts"):
        load_pretrained(folder)
    (folder / "meta_000010.json").unlink()
    with pytest.raises(CheckpointError, match=r"model_config — .*meta_000010\.json"):
        load_pretrained(folder)
