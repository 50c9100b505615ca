"""Write the model card of an export: README.md, as the Hugging Face hub shows it.

A card of a run's model says what it was trained on, with which recipe, to which losses and on which
machine. The card of any other model has its sizes alone. A card is published, so it holds no paths and
no settings of the machine or of other programs.
"""

import math
from collections.abc import Iterator
from pathlib import Path

from megatoken.base.config.load import RUN_CONFIG, format_value, read_recipe
from megatoken.base.config.model_config import ModelConfig, describe_heads
from megatoken.base.config.schema import FIELDS
from megatoken.base.console import format_count, format_duration
from megatoken.base.system.atomic_write import read_object
from megatoken.base.system.metrics_log import Row, find_last_rows
from megatoken.model.flops import count_parameters
from megatoken.store.run_folder import CHECKPOINTS, PROVENANCE

README = "README.md"
LIBRARIES = {"hf": "transformers", "peft": "peft", "gguf": "llama.cpp", "llmc": "llm.c"}
RECIPE_SECTIONS = ("seed", "model", "objective", "optim", "budget")
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
    step = source.resolve()
    run = step.parents[1] if step.parent.name == CHECKPOINTS else step
    if not ((run / RUN_CONFIG).is_file() and (run / PROVENANCE).is_file()):
        return
    settings = {each.key: each.text for each in read_recipe(run / RUN_CONFIG)}
    last = find_last_rows(run, ("train", "val"))
    machine = read_object(run / PROVENANCE)
    yield from ("## Training", "")
    yield from (f"- {line}" for line in _list_facts(settings.get("data.path", ""), last, machine))
    yield from ("", "The recipe, where it differs from the defaults:", "", "```")
    for (
        key,
        text,
    ) in settings.items():  # not parsed, because names of a user's module may be unknown
        is_default = key not in FIELDS or text == format_value(FIELDS[key].default)
        if key.partition(".")[0] in RECIPE_SECTIONS and not is_default:
            yield f"{key}={text}"
    yield from ("```", "")


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
    yield f"megatoken {machine.get('megatoken')}, torch {machine.get('torch')}"
