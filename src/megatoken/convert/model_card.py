"""Write the model card of an export: README.md, as the Hugging Face hub shows it.

A card of a run's model says what it was trained on, with which recipe, to which losses and on which
machine. The card of any other model has its sizes alone.
"""

import math
from collections.abc import Iterator
from pathlib import Path

from megatoken import __version__
from megatoken.base.config.load import RUN_CONFIG, read_recipe
from megatoken.base.config.model_config import ModelConfig, describe_heads
from megatoken.base.console import format_count, format_duration
from megatoken.base.system.atomic_write import read_object
from megatoken.base.system.metrics_log import Row, find_last_rows
from megatoken.model.flops import count_parameters
from megatoken.store.run_folder import PROVENANCE

README = "README.md"
LIBRARIES = {"hf": "transformers", "peft": "peft", "gguf": "llama.cpp", "llmc": "llm.c"}
USES = {
    "hf": """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoModelForCausalLM.from_pretrained("{name}")
ids = tokenizer("Once", return_tensors="pt").input_ids
print(tokenizer.decode(model.generate(ids, max_new_tokens=50)[0]))
```

`vllm serve {name}` serves it, and `megatoken sample {name} "Once"` continues a text.
""",
    "peft": """These are LoRA adapters:

```python
from peft import AutoPeftModelForCausalLM

model = AutoPeftModelForCausalLM.from_pretrained("{name}")
```
""",
    "gguf": "`llama-cli -m model.gguf -p Once` continues a text, `llama-server -m model.gguf` serves it.\n",
    "llmc": "llm.c reads `model.bin` and `gpt2_tokenizer.bin`: `train_gpt2cu -e model.bin`.\n",
}


def write_card(folder: Path, name: str, source: Path | None, config: ModelConfig, to: str) -> None:
    """Write README.md in an export, before what its format has written there.

    name: of the model, or its name on the hub. source: what was exported: a run, one of its
    checkpoints, or another model; None if unknown. to: the format.
    """
    path = folder / README
    added = path.read_text(encoding="utf-8") if path.exists() else ""
    size = f"{config.n_layer} layers, {describe_heads(config)}, width {config.d_model:,}"
    blocks = ", ".join(
        [config.norm, config.mlp, f"{config.pos_emb} positions", *config.switched_on]
    )
    lines = [
        "---",
        f"library_name: {LIBRARIES[to]}",
        "pipeline_tag: text-generation",
        "tags: [megatoken]",
        "# license: choose one, such as mit",
        "---",
        f"# {name.rpartition('/')[2]}",
        "",
        f"A language model of {count_parameters(config):,} parameters: {size}; {blocks}; a context of "
        f"{config.seq_len:,} tokens; {config.vocab_size:,} token ids.",
        "",
        *(_describe_run(source) if source else ()),
        "## Use",
        "",
        USES[to].format(name=name),
        "## License",
        "",
        "The author has not chosen a license: until there is one, all rights are reserved.",
        "",
        added.replace("# A chat model", "## A chat model", 1),
    ]
    path.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def _describe_run(source: Path) -> Iterator[str]:
    """Yield lines about the training of a run's model; none for another model."""
    for run in (source, source.parent.parent):
        if (run / RUN_CONFIG).is_file() and (run / PROVENANCE).is_file():
            break
    else:
        return
    given = read_given(run / RUN_CONFIG)
    last = find_last_rows(run, ("train", "val"))
    machine = read_object(run / PROVENANCE)
    yield from ("## Training", "")
    yield from (f"- {line}" for line in _list_facts(given.get("data.path", ""), last, machine))
    yield from ("", "Settings that are not the defaults:", "", "```")
    yield from (f"{key}={value}" for key, value in given.items())
    yield from ("```", "")


def read_given(config: Path) -> dict[str, str]:
    """Return the settings of a run that a recipe, preset or command line gave, as text.

    They are not checked: those of a user's module need not be known.
    """
    lines = config.read_text(encoding="utf-8").splitlines()
    numbered = [(each, int(each.where.rpartition(":")[2])) for each in read_recipe(config)]
    return {
        each.key: each.text
        for each, number in numbered
        if lines[number - 1].rpartition("  # ")[2] != "default"
    }


def _list_facts(data: str, last: dict[str, Row], machine: Row) -> Iterator[str]:
    if "train" in last:
        row = last["train"]
        duration = format_duration(float(row["elapsed_seconds"]))
        yield f"{row['tokens']:,} tokens of `{Path(data).name}` in {row['step']:,} steps, {duration}"
        yield f"training loss {float(row['loss']):.4f}"
    if "val" in last:
        row = last["val"]
        bits = float(row.get("bits_per_byte", math.nan))  # of text only
        text = f", {bits:.4f} bits per byte" if math.isfinite(bits) else ""
        yield f"held-out loss {float(row['loss']):.4f}{text}, at step {row['step']:,}"
    processes = format_count(int(machine.get("processes", 1)), "process", "processes")
    yield f"{processes} on {machine.get('device')}, {machine.get('precision')}"
    yield f"megatoken {__version__}, torch {machine.get('torch')}"
