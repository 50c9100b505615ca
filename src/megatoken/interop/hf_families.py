"""Which of Hugging Face's families a model is."""

from megatoken.errors import Exit, Fault
from megatoken.interop.hf_gpt2 import GPT2
from megatoken.interop.hf_layout import Config, Family
from megatoken.interop.hf_llama import LLAMA
from megatoken.presets import Shape

FAMILIES = {family.model_type: family for family in (GPT2, LLAMA)}


def family_named(config: Config, where: str) -> Family:
    """The family that a config.json says. Raises Fault(CHECKPOINT) naming `where` for one that is not known here."""
    kind = config.get("model_type")
    if kind not in FAMILIES:
        fix = f"supported: {' and '.join(FAMILIES)}"
        raise Fault(Exit.CHECKPOINT, f"model_type {kind!r} is not supported", where, fix)
    return FAMILIES[kind]


def family_of(shape: Shape) -> Family:
    """The family that computes what this shape does. Raises Fault(CONFIG) when there is none: switches can be mixed."""
    if (shape.norm, shape.positions, shape.mlp) == ("rmsnorm", "rotary", "swiglu"):
        return LLAMA
    gelu = shape.mlp != "swiglu"
    if (shape.norm, shape.positions, gelu, shape.kv_heads) == ("layernorm", "learned", True, shape.n_head):
        return GPT2
    what = f"no model of transformers has {shape.norm}, {shape.positions} positions, {shape.mlp} and "
    what += f"{shape.kv_heads} heads of keys and values together"
    raise Fault(Exit.CONFIG, what, "--to hf", "GPT-2's or LLaMA's switches can be exported")
