"""The knobs of the network: a published shape or sizes of one's own, and the switches between GPT-2 and LLaMA.

In: values. Out: a `Shape`, and the rules that a network's own numbers must keep. Science, all of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

from megatoken.knobs import knob
from megatoken.presets import PRESETS, Shape, usual_d_ff


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The shape of the network."""

    preset: str = knob("", "published shape to start from; the fields below override it")
    n_layer: int = knob(12, "transformer blocks", low=1)
    n_head: int = knob(12, "attention heads; must divide d_model", low=1)
    n_kv_head: int = knob(0, "heads of keys and values, which groups of heads share; 0: n_head", low=0)
    d_model: int = knob(768, "width of the residual stream", low=1)
    d_ff: int = knob(0, "width of the MLP; 0: 4 x d_model, with swiglu 8/3 of it up to a multiple of 256", low=0)
    vocab_size: int = knob(0, "token ids the model knows, before padding to 128; 0: the tokenizer's", low=0)
    seq_len: int = knob(1024, "context length", "tokens", low=1)
    norm: Literal["layernorm", "rmsnorm"] = knob("layernorm", "GPT-2's or LLaMA's")
    norm_eps: float = knob(1e-5, "added to the variance", low=0.0, open_low=True)
    positions: Literal["learned", "rotary"] = knob("learned", "embedded, or queries and keys turned by their place")
    rope_theta: float = knob(10000.0, "rotary: base of the wavelengths", low=1.0, open_low=True)
    rope_factor: float = knob(1.0, "rotary: how much longer the longest wavelengths become; 1: no scaling", low=1.0)
    rope_low: float = knob(1.0, "rotary scaling: full below so many turns in rope_context", "turns", low=0.0)
    rope_high: float = knob(4.0, "rotary scaling: none above so many turns in rope_context", "turns", low=0.0)
    rope_context: int = knob(8192, "rotary scaling: context it stretches", "tokens", low=1)
    mlp: Literal["gelu", "gelu-erf", "swiglu"] = knob(
        "gelu", "GPT-2's tanh form, the exact one of nanoGPT, or LLaMA's, which has a third matrix"
    )
    bias: bool = knob(True, "biases in matrix products and LayerNorm")
    tied: bool = knob(True, "the output layer is the token embedding")
    dropout: float = knob(0.0, "dropout probability in training", low=0.0, high=0.99)
    init: str = knob("", "start from the weights of this run folder or Hugging Face folder/name")

    def shape(self, vocab_size: int) -> Shape:
        """The sizes of the network for a tokenizer of `vocab_size` ids."""
        mine = {f.name for f in fields(self)}
        given = {f.name: getattr(self, f.name) for f in fields(Shape) if f.name in mine}
        given["d_ff"] = self.d_ff or usual_d_ff(self.d_model, self.mlp)
        return Shape(**given | {"vocab_size": self.vocab_size or vocab_size})


def find_misfits(model: Model) -> Iterator[tuple[str, str, str]]:
    """Rules between the network's own numbers: yields (key, what is wrong, what to do) for each that is broken."""
    if model.preset and model.preset not in PRESETS:
        yield "model.preset", f"unknown preset {model.preset!r}", "choose one of " + ", ".join(PRESETS)
    if model.d_model % model.n_head:
        what = f"{model.n_head} heads do not divide d_model {model.d_model}"
        yield "model.n_head", what, f"nearest that do: {nearest_divisors(model.n_head, model.d_model)}"
    elif model.positions == "rotary" and model.d_model // model.n_head % 2:
        what = f"heads of {model.d_model // model.n_head} channels cannot be turned in pairs"
        yield "model.n_head", what, "make d_model / n_head even, or set model.positions=learned"
    if model.n_kv_head and model.n_head % model.n_kv_head:
        what = f"{model.n_head} heads cannot share {model.n_kv_head} of keys and values evenly"
        yield "model.n_kv_head", what, f"nearest that divide: {nearest_divisors(model.n_kv_head, model.n_head)}"
    if model.rope_factor > 1 and model.rope_low >= model.rope_high:
        what = f"rope_low {model.rope_low:g} is not below rope_high {model.rope_high:g}"
        yield "model.rope_low", what, "LLaMA 3.1 has 1 and 4"


def nearest_divisors(value: int, whole: int) -> str:
    """The three divisors of `whole` nearest to `value`, in words."""
    fits = [d for d in range(1, whole + 1) if whole % d == 0]
    return ", ".join(map(str, sorted(sorted(fits, key=lambda d: abs(d - value))[:3])))
