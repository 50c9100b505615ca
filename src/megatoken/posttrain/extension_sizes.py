"""Count what LoRA and the value head add to a model. No torch."""

from megatoken.base.config.model_config import ModelConfig
from megatoken.model.extensions import Additions
from megatoken.model.flops import count_mlp_outputs


def count_lora(config: ModelConfig) -> Additions:
    """Count the adapters of one block and the outputs of their A (posttrain/lora.py)."""
    d, inputs = config.d_model, count_mlp_outputs(config) // config.d_ff
    attention = (3 * d + sum(config.qkv_rows)) + (config.attention_width + d)
    return Additions(
        freezes=True,
        block_parameters=config.lora_rank * (attention + (1 + inputs) * (d + config.d_ff)),
        block_outputs=config.lora_rank * (5 + inputs),
    )


def count_value_head(config: ModelConfig) -> Additions:
    """Count a weight and a bias (posttrain/value_head.py)."""
    return Additions(parameters=config.d_model + 1, decayed=config.d_model)
