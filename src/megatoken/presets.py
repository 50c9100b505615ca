"""Published model shapes by name: pure data, no torch.

GPT-2: Radford et al. 2019 and the released weights (the paper's table misprints the smallest as 117M).
GPT-3: Brown et al. 2020, table 2.1. Two entries of that table cannot be built as printed and are resolved
here: XL (1.3B) lists 24 heads of 128 at width 2048 (24 x 128 = 3072), taken as 16 heads of 128; 13B lists
width 5140 with 40 heads of 128 (= 5120), taken as 5120. Absent: GPT-3's alternating banded sparse attention
(every layer is dense here, as in every open reproduction).
"""

from dataclasses import dataclass

GPT2_VOCABULARY = 50257
VOCAB_MULTIPLE = 128  # rows of the embedding are padded to it


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes that define a model; vocab_size counts real tokens, before padding."""

    n_layer: int
    n_head: int
    d_model: int
    d_ff: int
    vocab_size: int
    seq_len: int
    vocab_multiple: int = VOCAB_MULTIPLE

    @property
    def d_head(self) -> int:
        return self.d_model // self.n_head

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: the next multiple of `vocab_multiple`, so that matrix kernels tile evenly."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple


def _gpt(n_layer: int, n_head: int, d_model: int, seq_len: int) -> Shape:
    return Shape(
        n_layer=n_layer,
        n_head=n_head,
        d_model=d_model,
        d_ff=4 * d_model,
        vocab_size=GPT2_VOCABULARY,
        seq_len=seq_len,
    )


PRESETS: dict[str, Shape] = {
    "gpt2-124m": _gpt(12, 12, 768, 1024),
    "gpt2-355m": _gpt(24, 16, 1024, 1024),
    "gpt2-774m": _gpt(36, 20, 1280, 1024),
    "gpt2-1558m": _gpt(48, 25, 1600, 1024),
    "gpt3-125m": _gpt(12, 12, 768, 2048),
    "gpt3-350m": _gpt(24, 16, 1024, 2048),
    "gpt3-760m": _gpt(24, 16, 1536, 2048),
    "gpt3-1.3b": _gpt(24, 16, 2048, 2048),
    "gpt3-2.7b": _gpt(32, 32, 2560, 2048),
    "gpt3-6.7b": _gpt(32, 32, 4096, 2048),
    "gpt3-13b": _gpt(40, 40, 5120, 2048),
    "gpt3-175b": _gpt(96, 96, 12288, 2048),
}
