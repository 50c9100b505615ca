"""Published speeds of training runs, with the layout of each.

`python -m tests.plan.published` prints the table of docs/numbers.md.

A few rows set constants of plan/speed.py (`sets` names them); the others only test. Journey,
Notebook and Lecture are megatoken.base.published.LADDER. Other sources: llm.c: its discussions 481
and 677, its scripts, and modded-nanogpt's copy of its log; Composer: MosaicML's posts on GPT-3 of
2022; foundry: llm-foundry's table of benchmarks, MPT models; nanoGPT: its pull request 464; modded:
logs of modded-nanogpt; torchtitan: its benchmark of December 2024; megatoken:
records/gpu-adamw-124m.json.
"""

from dataclasses import dataclass, replace

from megatoken.base.config.load import resolve_preset
from megatoken.base.config.model_config import ModelConfig
from megatoken.base.config.presets import PRESETS
from megatoken.base.published import LADDER
from megatoken.base.system.gpus import GPUS
from megatoken.plan.speed import Layout, estimate_step
from megatoken.plan.switches import plan_rungs
from tests.tables import read_table

# Layers, heads and width.
MPT = """
125M 12 12 768
350M 24 16 1024
760M 24 12 1536
1.3B 24 16 2048
3B 32 20 2560
7B 32 32 4096
13B 40 40 5120
"""
REASONS = """
old PyTorch of 2022: FSDP without today's overlap, no FlashAttention
attention its Triton attention of 2023 is slower at long contexts
"""


@dataclass(frozen=True)
class Published:
    """A published run.

    tokens_per_second, predicted: of all GPUs. sets: the constant that this row sets; "" if it only
    tests. reason: why the error is above a quarter."""

    source: str
    what: str
    gpus: int
    gpu: str
    tokens_per_second: float
    predicted: float
    sets: str = ""
    reason: str = ""

    @property
    def error(self) -> float:
        return self.predicted / self.tokens_per_second - 1


def mpt(name: str) -> ModelConfig:
    """Return a model of llm-foundry, GPT-3's shapes without biases: mpt-SIZE-CONTEXT."""
    _, size, seq_len = name.split("-")
    n_layer, n_head, d_model = map(int, read_table(MPT)[size].split())
    sizes = {"n_layer": n_layer, "n_head": n_head, "d_model": d_model, "d_ff": 4 * d_model}
    return ModelConfig(**sizes, seq_len=int(seq_len), vocab_size=50368, bias=False)


# The constants that rungs of published.LADDER set, by device and name.
LADDER_SETS = """
H100 fp32: fp32 share
H100 compile: host
H100 fused AdamW: host
T4 fp32: fp32 share
T4 fused AdamW: products
A100-80GB fp32: fp32 share
A100-80GB bf16: explicit attention
A100-80GB fused AdamW: products
"""
# source | run | model | GPUs | micro-batch x steps | tokens/s | layout | constant or reason
TABLE = """
Journey | 1558M, 16 x 1,024, 8 a step | gpt2-1558m | 8 H100 | 16x8 |    320000
llm.c | 124M, 64 x 1,024 | gpt2-124m | 8 A100-40GB | 64x1 |   1590000 | fused gelu zero1
llm.c | 124M, 64 x 1,024 | gpt2-124m | 8 A100-80GB | 64x1 |   1848000 | fused zero1
llm.c | 124M, 64 x 1,024 | gpt2-124m | 8 H100 | 64x1 |   3744000 | fused zero1
llm.c | 350M, 64 x 1,024 | gpt2-355m | 8 A100-80GB | 64x1 |    639200 | fused zero1
llm.c | 1558M, 16 x 1,024 | gpt2-1558m | 8 H100 | 16x8 |    374400 | fused zero1 | products
Composer | 1.3B, 1B tokens in 7.1 h | gpt3-1.3b | 8 A100-40GB |  4x8 |  39123.63 | eager explicit block zero3 | old
Composer | 1.3B, 20B tokens in 1.5 days | gpt3-1.3b | 32 A100-40GB |  4x2 | 154320.99 | eager explicit block zero3 | old
Composer | 1.3B, 1B tokens in 0.5 h | gpt3-1.3b | 128 A100-40GB |  2x1 | 555555.56 | eager explicit block zero3 | old
foundry | 125M, context 1,024 | mpt-125M-1024 | 8 A100-80GB | 64x2 |   1251751 | eager zero3
foundry | 125M, context 8,192 | mpt-125M-8192 | 8 A100-80GB |  8x2 |    723142 | eager zero3 | attention
foundry | 350M, context 2,048 | mpt-350M-2048 | 8 A100-80GB | 32x2 |    470263 | eager zero3
foundry | 760M, context 2,048 | mpt-760M-2048 | 8 A100-80GB | 24x2 |    259472 | eager zero3
foundry | 1.3B, context 2,048 | mpt-1.3B-2048 | 8 A100-80GB | 14x4 |    164109 | eager zero3
foundry | 1.3B, context 2,048 | mpt-1.3B-2048 | 8 A100-40GB |  8x8 |    154171 | eager zero3
foundry | 1.3B, context 2,048 | mpt-1.3B-2048 | 128 A100-40GB | 10x1 |   2386897 | eager zero3
foundry | 3B, context 2,048 | mpt-3B-2048 | 8 A100-80GB | 10x2 |     86491 | eager zero3
foundry | 3B, context 2,048 | mpt-3B-2048 | 128 A100-40GB |  6x1 |   1220885 | eager zero3
foundry | 7B, context 2,048 | mpt-7B-2048 | 8 A100-80GB |  6x2 |     37130 | eager zero3 | products
foundry | 7B, context 2,048, blocks recomputed | mpt-7B-2048 | 128 A100-40GB | 18x1 |    463749 | eager block zero3
foundry | 13B, context 2,048, blocks recomputed | mpt-13B-2048 | 128 A100-40GB | 16x1 |    252444 | eager block zero3
foundry | 760M, context 2,048 | mpt-760M-2048 | 8 H100 | 24x2 |    505177 | eager zero3
foundry | 1.3B, context 1,024 | mpt-1.3B-1024 | 8 H100 | 18x4 |    391287 | eager zero3
foundry | 1.3B, context 2,048 | mpt-1.3B-2048 | 8 H100 | 14x1 |    363645 | eager zero3
foundry | 1.3B, context 2,048 | mpt-1.3B-2048 | 256 H100 | 12x1 |  10894207 | eager zero3 | waiting
foundry | 3B, context 8,192 | mpt-3B-8192 | 8 H100 |  3x6 |    132626 | eager zero3 | attention
foundry | 3B, context 2,048 | mpt-3B-2048 | 512 H100 |  8x1 |  11092218 | eager zero3
foundry | 7B, context 2,048 | mpt-7B-2048 | 8 H100 |  6x1 |     85144 | eager zero3 | products
foundry | 7B, context 2,048 | mpt-7B-2048 | 512 H100 |  6x1 |   4951479 | eager zero3
foundry | 13B, context 2,048, blocks recomputed | mpt-13B-2048 | 128 H100 | 16x1 |    650264 | eager block zero3
nanoGPT | 124M, 64 x 1,024 | gpt2-124m | 1 H100 | 64x8 |    380000
modded | 124M, 64 x 1,024, plain GPT | gpt2-124m | 1 H200 | 64x8 |    488000
megatoken | 124M, 64 x 1,024 | gpt2-124m | 1 H200 | 64x1 |    560670 | fused
modded | 124M, 64 x 1,024, plain GPT | gpt2-124m | 8 H100 | 64x1 |   3696000
torchtitan | LLaMA 3.1 8B, context 8,192 | llama3-8b | 8 H100 |  1x1 |     46080 | eager block zero3
torchtitan | the same, compiled | llama3-8b | 8 H100 |  1x1 |     53360 | block zero3
"""
LAYOUT_FIELDS = """
eager program
fused program
explicit attention
zero1 sharding
zero3 sharding
gelu checkpointing
block checkpointing
"""


def read_row(line: str) -> Published:
    cells = [cell.strip() for cell in line.split("|")]
    source, what, model, gpus, batch, rate, layout_fields, note = cells + [""] * (8 - len(cells))
    count, gpu = gpus.split()
    micro_batch, micro_steps = map(int, batch.split("x"))
    layout = Layout(gpus=int(count), micro_batch=micro_batch, micro_steps=micro_steps)
    if source in ("llm.c", "foundry"):
        layout = replace(layout, gradient_bytes=2)
    for value in layout_fields.split():
        layout = replace(layout, **{read_table(LAYOUT_FIELDS)[value]: value})
    config = PRESETS[model] if model in PRESETS else mpt(model)
    predicted = estimate_step(config, GPUS[gpu], layout).tokens_per_second
    reason = read_table(REASONS).get(note, "")
    sets = "" if reason else note
    return Published(source, what, int(count), gpu, float(rate), predicted, sets, reason)


def read_ladder(device: str) -> list[Published]:
    """Return the published rungs of a device, with predictions of the same settings and batches."""
    rungs = [rung for rung in LADDER if rung.device == device]
    config = replace(resolve_preset("gpt2-124m", ()).config, model=PRESETS["gpt2-124m"])
    sets = dict(line.split(": ") for line in LADDER_SETS.strip().splitlines())
    rows = plan_rungs(config, GPUS[device], rungs)
    return [
        Published(
            rung.source.capitalize(),
            f"124M, {rung.micro_batch} x 1,024, {rung.name}",
            rung.gpus,
            device,
            row["published"],
            row["tokens_per_second"],
            sets=sets.get(f"{device} {rung.name}", ""),
        )
        for rung, row in zip(rungs, rows, strict=True)
    ]


DEVICES = dict.fromkeys(rung.device for rung in LADDER if rung.device in GPUS)
ROWS = [row for device in DEVICES for row in read_ladder(device)]
ROWS += [read_row(line) for line in TABLE.strip().splitlines()]


def median_error(rows: list[Published]) -> float:
    errors = sorted(abs(each.error) for each in rows)
    return errors[len(errors) // 2]


def draw_table() -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| source | run | GPUs | published, tokens/s | predicted | error | sets |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in ROWS:
        gpus = f"{each.gpus} x {each.gpu}"
        rates = f"{each.tokens_per_second:,.0f} | {each.predicted:,.0f} | {each.error:+.0%}"
        lines.append(f"| {each.source} | {each.what} | {gpus} | {rates} | {each.sets} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(draw_table())
    print(median_error(ROWS), median_error([each for each in ROWS if not each.sets]))
