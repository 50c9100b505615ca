"""Validation loss per token and per byte of text, and perplexity."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
import torch.nn.functional as F
from tokenizers import decoders, models, normalizers, pre_tokenizers

from megatoken.base.rooms import load_entry
from megatoken.data.dataloader import to_batch
from megatoken.data.dataset import load_dataset
from megatoken.data.shard_format import read_manifest
from megatoken.inference.evaluate import evaluate
from megatoken.model.gpt import set_attention, set_block_kernels
from megatoken.model.native.selection import find_library
from megatoken.text.prepare import prepare
from megatoken.text.tokenizer import Tokenizer, load_tokenizer
from megatoken.train.val_loss import loss_metrics, validation_loss
from tests.convert.models import llama_tokenizer
from tests.inference.reference_scorer import CPU, SINGLE, make_model
from tests.tiny_run import read_rows, train, write_jsonl

BYTES = load_tokenizer("bytes")
TEXT = "Größe, 大きさ, taille. " * 8


def test_mean_over_all_targets_and_bits_per_byte():
    model = make_model(seq_len=16, n_layer=1)
    ids = np.array([*BYTES.encode(TEXT)[:80], BYTES.eot, *BYTES.encode(TEXT)[:24]], np.uint16)
    rows = [ids[:34].reshape(2, 17), ids[34:102].reshape(4, 17)]
    result = validation_loss(
        model, rows, CPU, chunk=8, comm=SINGLE, count_bytes=BYTES.vocabulary.count_bytes
    )
    inputs = torch.from_numpy(np.concatenate(rows).astype(np.int64))
    with torch.no_grad():
        logits = model.logits(inputs[:, :-1]).flatten(0, 1)
    loss = float(F.cross_entropy(logits, inputs[:, 1:].flatten()))
    assert result["loss"] == pytest.approx(loss, rel=1e-6)
    # The end-of-text token has no text.
    assert (result["target_tokens"], result["text_bytes"]) == (96, 95)
    assert result["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    assert result["bits_per_byte"] == pytest.approx(loss * 96 / 95 / math.log(2), rel=1e-6)
    assert model.training


@pytest.mark.skipif(find_library() is None, reason="the native kernels are not compiled")
def test_the_precision_does_not_depend_on_masks():
    model = make_model(seq_len=16, n_layer=1)
    set_attention(model, "native")
    set_block_kernels(model, load_entry("block_kernels", "native"))
    device = replace(CPU, precision="bf16")
    batch = to_batch(np.arange(34).reshape(2, 17))
    options = {"chunk": 8, "comm": SINGLE, "count_bytes": BYTES.vocabulary.count_bytes}
    plain, masked = (
        validation_loss(model, [rows], device, **options)["loss"]
        for rows in (batch, replace(batch, starts_BT=torch.zeros(2, 16, dtype=torch.int64)))
    )
    assert plain == pytest.approx(masked, rel=1e-6)


def test_extreme_values():
    assert loss_metrics(1e6, 1, 1)["perplexity"] == pytest.approx(math.exp(709))
    assert math.isnan(loss_metrics(1.0, 1, 0)["bits_per_byte"])


def build_tokenizer(kind: str) -> Tokenizer:
    """Return a tokenizer of bytes and a few words that changes text in its own way."""
    if kind == "prefix":
        return llama_tokenizer()
    if kind in ("bpe:300", "added space"):
        tokenizer = load_tokenizer("bpe:300", lambda: iter([TEXT]))
        if kind == "bpe:300":
            return tokenizer
        inner = tokenizers.Tokenizer.from_str(tokenizer.to_json())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    else:
        space = "\u2581"
        is_nfkc = kind == "NFKC"
        words = ["the", "a", "n", "fi", *([space, f"{space}the"] if is_nfkc else [])]
        tokens = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
        ids = {token: id for id, token in enumerate(tokens)}
        inner = tokenizers.Tokenizer(models.BPE(ids, [], unk_token="<unk>", byte_fallback=True))
        changes = [normalizers.NFKC()] if is_nfkc else []
        inner.normalizer = normalizers.Sequence([*changes, normalizers.Replace(" ", space)])
        steps = [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace(space, " ")]
        inner.decoder = decoders.Sequence(steps)
    inner.add_special_tokens(["<unk>", "</s>"])
    return Tokenizer(inner, kind, inner.token_to_id("</s>"))


@pytest.mark.parametrize("kind", ["no U+2581", "prefix", "NFKC", "added space", "bpe:300"])
def test_the_bytes_are_those_of_the_text(kind: str, tmp_path: Path):
    tokenizer = build_tokenizer(kind)
    model = make_model(seq_len=16, n_layer=1, vocab_size=tokenizer.vocab_size)
    texts = ["a", "an the \ufb01n \u5927 \u2014  the", "then a \n", "\u304d a"]
    text = write_jsonl(tmp_path / "text.jsonl", [{"text": text} for text in texts])
    result = evaluate(model, tokenizer, data=text)
    assert result["text_bytes"] == sum(len(text.encode()) for text in texts) - (kind == "bpe:300")
    nats = result["loss"] * result["target_tokens"]
    assert result["bits_per_byte"] == pytest.approx(nats / math.log(2) / result["text_bytes"])
    tokenizer.vocabulary.save(tmp_path / "tokenizer")
    shards = tmp_path / "shards"
    prepare(str(text), shards, tokenizer=f"{tmp_path}/tokenizer", val_fraction=0)
    for limit in (0, 32):
        results = [evaluate(model, tokenizer, data=data, limit=limit) for data in (text, shards)]
        for each in results:
            del each["data"], each["split"]
        assert results[0] == results[1]
    first = {"no U+2581": 1, "prefix": 0, "bpe:300": 0}  # bytes of the first token, no target
    if kind in first:  # the others change the text
        tokens = load_dataset(shards).train
        ids = tokens.gather(np.array([0]), len(tokens)).astype(np.int64)
        assert (
            tokenizer.vocabulary.count_bytes(ids[:, :-1], ids[:, 1:])
            == result["text_bytes"] - first[kind]
        )


def test_a_run_measures_the_bytes_of_text_that_its_tokenizer_changes(tmp_path: Path):
    build_tokenizer("NFKC").vocabulary.save(tmp_path / "tokenizer")
    lines = [f"\ufb01n the{'  a' * (number % 5)} \ufb01" for number in range(200)]
    (tmp_path / "text.txt").write_text("<|endoftext|>".join(lines))
    shards = tmp_path / "shards"
    prepare(tmp_path / "text.txt", shards, tokenizer=f"{tmp_path}/tokenizer", val_fraction=0.3)
    train(tmp_path / "run", f"data.path={shards} budget.steps=1 evaluate.tokens=100000")
    row = read_rows(tmp_path / "run", "val")[-1]
    manifest = read_manifest(shards)
    n_bytes = manifest.bytes["val"]
    assert n_bytes["text"] > n_bytes["decoded"]
    bits = row["loss"] * (manifest.tokens("val") - 1) / math.log(2)
    assert row["bits_per_byte"] == pytest.approx(bits / n_bytes["text"], rel=1e-3)
