"""Validation loss: per token, as perplexity, per byte of text."""

import json
import math
import pickle
import queue
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatoken.data.tokenizer import load_tokenizer
from megatoken.distributed.comm import Comm
from megatoken.distributed.env import DistEnv
from megatoken.errors import DataError
from megatoken.eval.evaluate import open_tokens
from megatoken.eval.val_loss import loss_metrics, validation_loss
from tests.eval.reference_scorer import CPU, SINGLE, make_model

BYTES = load_tokenizer("bytes")
TEXT = "Größe, 大きさ, taille. " * 8


def test_mean_over_all_targets_and_bits_per_byte() -> None:
    model = make_model(seq_len=16, n_layer=1)
    ids = np.array([*BYTES.encode(TEXT)[:80], BYTES.eot, *BYTES.encode(TEXT)[:24]], np.uint16)
    rows = [ids[:34].reshape(2, 17), ids[34:102].reshape(4, 17)]
    result = validation_loss(model, rows, CPU, chunk=8, comm=SINGLE, byte_lengths=BYTES.byte_lengths)
    inputs = torch.from_numpy(np.concatenate(rows).astype(np.int64))
    with torch.no_grad():
        loss = F.cross_entropy(model.logits(inputs[:, :-1]).flatten(0, 1), inputs[:, 1:].flatten())
    assert result["loss"] == pytest.approx(float(loss), rel=1e-6)
    assert result["target_tokens"] == 96
    assert result["text_bytes"] == 95  # the end-of-text token has no text
    assert result["perplexity"] == pytest.approx(math.exp(float(loss)), rel=1e-5)
    assert result["bits_per_byte"] == pytest.approx(float(loss) * 96 / 95 / math.log(2), rel=1e-6)
    assert model.training


def test_extreme_values() -> None:
    assert loss_metrics(1e6, 1, 1)["perplexity"] == pytest.approx(math.exp(709))
    assert math.isnan(loss_metrics(1.0, 1, 0)["bits_per_byte"])


@pytest.mark.parametrize("spec", ["bytes", "bpe:300"])
def test_byte_lengths_sum_to_the_text(spec: str) -> None:
    tokenizer = load_tokenizer(spec, lambda: iter([TEXT]))
    lengths = tokenizer.byte_lengths
    assert lengths[tokenizer.encode(TEXT)].sum() == len(TEXT.encode())
    assert lengths[tokenizer.eot] == 0
    assert lengths.shape == (tokenizer.vocab_size,)


def test_byte_lengths_of_sentencepiece(tmp_path: Path) -> None:
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
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    assert load_tokenizer(str(path)).byte_lengths.tolist() == [0, 0, 1, 4, 3, 1]


class MailboxComm(Comm):
    """One of two ranks that run one after another; `mailbox` holds what rank 0 has sent."""

    def __init__(self, rank: int, mailbox: "queue.Queue[bytes]") -> None:
        super().__init__(DistEnv(rank=rank, world_size=2))
        self.mailbox = mailbox

    def broadcast_from_rank0(self, value: Any) -> Any:
        if self.dist_env.is_main_process:
            self.mailbox.put(pickle.dumps(value))
            return value
        return pickle.loads(self.mailbox.get_nowait())


def test_text_that_rank_0_cannot_prepare_is_refused_by_all_ranks(tmp_path: Path) -> None:
    """The others waited for rank 0."""
    mailbox: queue.Queue[bytes] = queue.Queue()
    messages = []
    for rank in (0, 1):
        comm = MailboxComm(rank, mailbox)
        with pytest.raises(DataError) as error, open_tokens(tmp_path / "nowhere.txt", BYTES, None, comm):
            pass
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    assert "nowhere.txt" in messages[0]
