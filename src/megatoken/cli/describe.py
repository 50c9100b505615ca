"""`megatoken describe MODEL`: print the parameters, FLOPs and memory of a model, or its tensors."""

import math
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from megatoken.base.config.load import list_recipes
from megatoken.base.config.model_config import ModelConfig, describe_heads
from megatoken.base.config.presets import PRESETS
from megatoken.base.console import Console, format_count, format_memory
from megatoken.base.errors import ConfigError
from megatoken.base.system.gpus import parse_gpus
from megatoken.cli import Data
from megatoken.cli.arguments import add_options
from megatoken.cli.recipe import PRESET_HELP, add_recipe_arguments, find_model, find_vocabulary
from megatoken.model import flops
from megatoken.optim.costs import count_saved_bytes
from megatoken.store.manifest import encode_model_config

HELP = "print the parameters, FLOPs and memory of a preset or recipe"
EXAMPLE = "megatoken describe gpt2-124m"


def add_arguments(parser: ArgumentParser) -> None:
    add_recipe_arguments(parser, f"{PRESET_HELP}; with --tensors also any MODEL of `sample`")
    add_options(parser, __file__)


def run(options: Namespace, console: Console) -> Data:
    if options.tensors:
        return list_model_tensors(options, console)
    resolved, model, _ = find_model(options)
    config = resolved.config
    decayed = flops.count_decayed_parameters(model)
    data: dict[str, Any] = {
        "parameters": flops.count_parameters(model),
        "matmul_parameters": flops.count_matmul_parameters(model),
        "decayed_parameters": decayed,
        "other_parameters": flops.count_padded_parameters(model) - decayed,
        "flops_per_token_full": flops.flops_per_token(model, causal=False),
        "flops_per_token_causal": flops.flops_per_token(model, causal=True),
        "state_bytes": count_saved_bytes(config.optim.name, model),
        "expected_initial_loss": flops.expected_initial_loss(model),
        **encode_model_config(model),
    }
    vocabulary = f"{model.vocab_size:,} ids, padded to {model.padded_vocab_size:,}"
    if not config.model.vocab_size:
        vocabulary += f" (from the tokenizer: {find_vocabulary(config)[1]})"
    size = f"{model.n_layer} layers, {describe_heads(model)}, width {model.d_model:,}"
    full, causal = data["flops_per_token_full"], data["flops_per_token_causal"]
    state = f"{format_memory(data['state_bytes'])}, fp32 weights and {config.optim.name}"
    rows = [
        ("model", f"{resolved.name}: {size}"),
        ("blocks", describe_blocks(model)),
        ("context", f"{model.seq_len:,} tokens"),
        ("vocabulary", vocabulary),
        ("parameters", f"{data['parameters']:,}"),
        ("in matmuls", f"{data['matmul_parameters']:,}"),
        ("decayed", f"{decayed:,}, others {data['other_parameters']:,} (with padding)"),
        ("FLOPs/token", f"{full:,} full attention, {causal:,} causal"),
        ("state", state),
        ("first loss", f"ln(V) = {data['expected_initial_loss']:.3f} nats"),
    ]
    if options.rate:
        rows += describe_mfu(options, data)
    console.table(rows)
    return data


def describe_mfu(options: Namespace, data: dict[str, Any]) -> list[tuple[str, str]]:
    """Return rows with the MFU at --rate against each peak of --gpu, and add them to `data`."""
    counts, gpu = parse_gpus(options.gpu)
    rows = []
    for kind in ("full", "causal"):
        rate = options.rate * data[f"flops_per_token_{kind}"] / counts[0]
        mfu = {precision: rate / peak for precision, peak in gpu.peaks.items()}
        data[f"mfu_{kind}"] = mfu
        rows.append((f"MFU {kind}", ", ".join(f"{mfu[name]:.2%} of {name}" for name in mfu)))
    return rows


def describe_blocks(model: ModelConfig) -> str:
    """Return the architecture of the blocks and the output layer."""
    parts = [
        model.norm,
        f"{model.mlp} of {model.d_ff:,}",
        f"{model.pos_emb} positions",
        f"heads of {model.d_head}",
        *([] if model.bias else ["no biases"]),
        f"{'tied' if model.tie_embeddings else 'untied'} output layer",
        *model.switched_on,
    ]
    return ", ".join(parts)


def list_model_tensors(options: Namespace, console: Console) -> Data:
    """Print the tensors of a preset, recipe or model file."""
    from megatoken.cli.list_tensors import list_parameters, list_tensors

    name = options.recipe
    if name in (*PRESETS, *list_recipes()) or Path(name).suffix in (".yaml", ".yml"):
        tensors = list_parameters(find_model(options)[1])
    elif options.overrides:
        raise ConfigError("a model file takes no settings", options.overrides[0], "leave them out")
    else:
        tensors = list_tensors(name, console.warn)
    rows = [{**tensor._asdict(), "parameters": math.prod(tensor.shape)} for tensor in tensors]
    total = sum(row["parameters"] for row in rows)
    if not options.json and rows:
        cells = [
            (
                row["name"],
                " x ".join(map(str, row["shape"])),
                row["dtype"],
                f"{row['parameters']:,}",
            )
            for row in rows
        ]
        console.table(cells, left=3)
    console.print(f"{total:,} parameters in {format_count(len(rows), 'tensor')}")
    return {"tensors": rows, "parameters": total}
