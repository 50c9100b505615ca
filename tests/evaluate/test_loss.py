"""Held-out loss as a number that people compare: per token, as perplexity, per byte of text."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatoken.data.tokenizer import load_tokenizer
from megatoken.evaluate.loss import HeldOut, held_out_loss
from megatoken.model.gpt import GPT, initialize
from megatoken.presets import Shape
from tests.evaluate.plain import ALONE, CPU

BYTES = load_tokenizer("bytes")
TEXT = "Größe, 大きさ, taille. " * 8


def test_the_mean_over_all_targets_and_the_bytes_they_spell() -> None:
    model = GPT(Shape(n_layer=1, n_head=2, d_model=16, d_ff=32, vocab_size=257, seq_len=16))
    initialize(model, 0)
    ids = np.array([*BYTES.encode(TEXT)[:80], BYTES.eot, *BYTES.encode(TEXT)[:24]], np.uint16)
    rows = [ids[:34].reshape(2, 17), ids[34:102].reshape(4, 17)]
    held = held_out_loss(model, rows, CPU, chunk=8, ranks=ALONE, byte_lengths=BYTES.byte_lengths)
    inputs = torch.from_numpy(np.concatenate(rows).astype(np.int64))
    with torch.no_grad():
        loss = F.cross_entropy(model.logits(model(inputs[:, :-1])).flatten(0, 1), inputs[:, 1:].flatten())
    assert held.loss == pytest.approx(float(loss), rel=1e-6)
    assert held.targets == 96
    assert held.text_bytes == 95  # the mark between documents is no text
    assert held.perplexity == pytest.approx(math.exp(float(loss)), rel=1e-5)
    assert held.bits_per_byte == pytest.approx(float(loss) * 96 / 95 / math.log(2), rel=1e-6)
    assert model.training


def test_numbers_at_the_ends_of_what_a_float_holds() -> None:
    assert HeldOut(1e6, 1, 1).perplexity == pytest.approx(math.exp(709))
    assert math.isnan(HeldOut(1.0, 1, 0).bits_per_byte)


@pytest.mark.parametrize("spec", ["bytes", "bpe:300"])
def test_ids_know_how_many_bytes_they_spell(spec: str) -> None:
    tokenizer = load_tokenizer(spec, lambda: iter([TEXT]))
    lengths = tokenizer.byte_lengths
    assert lengths[tokenizer.encode(TEXT)].sum() == len(TEXT.encode())
    assert lengths[tokenizer.eot] == 0
    assert lengths.shape == (tokenizer.vocab_size,)


def test_pieces_of_sentencepiece_spell_bytes_too(tmp_path_factory: pytest.TempPathFactory) -> None:
    import json

    vocabulary = {"<unk>": 0, "</s>": 1, "<0xE5>": 2, "\u2581hé": 3, "llo": 4, "\u2581": 5}
    content = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": t, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
             "special": True} for t, i in (("<unk>", 0), ("</s>", 1))
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False},
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}, {"type": "ByteFallback"},
        ]},
        "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "vocab": vocabulary,
                  "merges": []},
    }  # fmt: skip
    path = tmp_path_factory.mktemp("llama") / "tokenizer.json"
    path.write_text(json.dumps(content))
    assert load_tokenizer(str(path)).byte_lengths.tolist() == [0, 0, 1, 4, 3, 1]
