"""Published speeds of training runs with what the planner has to know of each; `python -m tests.estimate.published`
prints the table of docs/numbers.md.

A few rows set constants of estimate/speed.py (`sets` names them); the others only test. Sources:
Journey, a published account of training GPT-2 from a laptop to 8 H100; llm.c: its discussions 481
and 677, its scripts, and modded-nanogpt's copy of its log; Notebook: build-nanogpt in a notebook,
with the figures of its lecture; Composer: MosaicML's posts on GPT-3 of 2022; foundry: llm-foundry's
table of benchmarks, MPT models; nanoGPT: its pull request 464; modded: logs of modded-nanogpt;
torchtitan: its benchmark of December 2024.
"""

from dataclasses import dataclass, replace

from megatoken.config.model_config import ModelConfig
from megatoken.config.presets import PRESETS
from megatoken.estimate.speed import Layout, estimate_step
from megatoken.system.gpus import GPUS

SMALL, XL = PRESETS["gpt2-124m"], PRESETS["gpt2-1558m"]
MPT = {
    "125M": (12, 12, 768),
    "350M": (24, 16, 1024),
    "760M": (24, 12, 1536),
    "1.3B": (24, 16, 2048),
}
MPT |= {"3B": (32, 20, 2560), "7B": (32, 32, 4096), "13B": (40, 40, 5120)}
OLD = "PyTorch of 2022: FSDP without today's overlap, no FlashAttention"
SLOW_ATTENTION = "its Triton attention of 2023 is slower at long contexts"


@dataclass(frozen=True)
class Published:
    """tokens_per_second: of all GPUs. sets: the constant chosen by this row, else it only tests. reason: of an error
    above a quarter."""

    source: str
    what: str
    model: ModelConfig
    gpu: str
    layout: Layout
    tokens_per_second: float
    sets: str = ""
    reason: str = ""

    @property
    def predicted(self) -> float:
        return estimate_step(self.model, GPUS[self.gpu], self.layout).tokens_per_second

    @property
    def error(self) -> float:
        return self.predicted / self.tokens_per_second - 1


def mpt(size: str, seq_len: int) -> ModelConfig:
    """A model of llm-foundry: GPT-3's shapes without biases."""
    n_layer, n_head, d_model = MPT[size]
    sizes = {"n_layer": n_layer, "n_head": n_head, "d_model": d_model, "d_ff": 4 * d_model}
    return ModelConfig(**sizes, seq_len=seq_len, vocab_size=50368, bias=False)


def row(
    source: str, what: str, model: ModelConfig, gpu: str, rate: float, layout: Layout, **others: str
) -> Published:
    return Published(source, what, model, gpu, layout, rate, **others)


# Size (* recomputes blocks), context, GPUs, micro-batch, micro-batches per step, tokens/s.
FOUNDRY = """
125M   1024    8 A100-80GB  64  2   1251751
125M   8192    8 A100-80GB   8  2    723142 slow-attention
350M   2048    8 A100-80GB  32  2    470263
760M   2048    8 A100-80GB  24  2    259472
1.3B   2048    8 A100-80GB  14  4    164109
1.3B   2048    8 A100-40GB   8  8    154171
1.3B   2048  128 A100-40GB  10  1   2386897
3B     2048    8 A100-80GB  10  2     86491
3B     2048  128 A100-40GB   6  1   1220885
7B     2048    8 A100-80GB   6  2     37130 sets=products
7B*    2048  128 A100-40GB  18  1    463749
13B*   2048  128 A100-40GB  16  1    252444
760M   2048    8 H100       24  2    505177
1.3B   1024    8 H100       18  4    391287
1.3B   2048    8 H100       14  1    363645
1.3B   2048  256 H100       12  1  10894207 sets=waiting
3B     8192    8 H100        3  6    132626 slow-attention
3B     2048  512 H100        8  1  11092218
7B     2048    8 H100        6  1     85144 sets=products
7B     2048  512 H100        6  1   4951479
13B*   2048  128 H100       16  1    650264
"""


def foundry(line: str) -> Published:
    size, seq_len, gpus, gpu, micro_batch, micro_steps, rate, *notes = line.split()
    recomputes = size.endswith("*")
    layout = Layout(
        gpus=int(gpus),
        micro_batch=int(micro_batch),
        micro_steps=int(micro_steps),
        sharding="zero3",
        program="eager",
        gradient_bytes=2,
        checkpointing="block" if recomputes else "none",
    )
    size = size.rstrip("*")
    what = f"{size}, context {int(seq_len):,}{', blocks recomputed' if recomputes else ''}"
    others = {"reason": SLOW_ATTENTION} if "slow-attention" in notes else {}
    others |= dict(note.split("=") for note in notes if "=" in note)
    return row("foundry", what, mpt(size, int(seq_len)), gpu, float(rate), layout, **others)


PLAIN = Layout(program="eager", attention="explicit", adamw="foreach")
LLMC = Layout(gpus=8, micro_batch=64, program="fused", sharding="zero1", gradient_bytes=2)
LLMC_XL = replace(LLMC, micro_batch=16, micro_steps=8)
COMPOSER = Layout(
    program="eager", attention="explicit", sharding="zero3", checkpointing="block", micro_batch=4
)
FIRST, LECTURE = replace(PLAIN, micro_batch=4), replace(PLAIN, micro_batch=16)


def lecture(what: str, gpu: str, milliseconds: float, layout: Layout, **others: str) -> Published:
    rate = layout.micro_batch * 1024 / milliseconds * 1e3
    return row("Notebook", f"124M, {what}, {milliseconds:g} ms", SMALL, gpu, rate, layout, **others)


def composer(what: str, rate: float, **layout: int) -> Published:
    model = PRESETS["gpt3-1.3b"]
    return row(
        "Composer",
        f"1.3B, {what}",
        model,
        "A100-40GB",
        rate,
        replace(COMPOSER, **layout),
        reason=OLD,
    )


TITAN, LLAMA = Layout(gpus=8, sharding="zero3", checkpointing="block"), PRESETS["llama3-8b"]
COMPILED = Layout(micro_batch=16, adamw="foreach")
T4 = Layout(micro_batch=4, precision="fp16", adamw="foreach")
ROWS = [
    row("Journey", "124M, 1 x 1,024, fp32", SMALL, "RTX-3090", 11_381, replace(PLAIN, precision="fp32")),
    row("Journey", "124M, 1 x 1,024, fp32", SMALL, "H100", 27_026, replace(PLAIN, precision="fp32"), sets="fp32 share"),
    row("Journey", "the same, TF32", SMALL, "H100", 46_632, replace(PLAIN, precision="tf32")),
    row("Journey", "the same, bf16", SMALL, "H100", 42_871, PLAIN),
    row("Journey", "and FlashAttention", SMALL, "H100", 48_154, replace(PLAIN, attention="flash")),
    row("Journey", "and compiled", SMALL, "H100", 55_271, Layout(adamw="foreach"), sets="host"),
    row("Journey", "and fused AdamW", SMALL, "H100", 78_750, Layout(), sets="host"),
    row("Journey", "and 64 x 1,024", SMALL, "H100", 350_000, Layout(micro_batch=64)),
    row("Journey", "and on 8 GPUs", SMALL, "H100", 3_046_409, Layout(micro_batch=64, gpus=8)),
    row("Journey", "1558M, 16 x 1,024, 8 a step", XL, "H100", 320e3, Layout(gpus=8, micro_batch=16, micro_steps=8)),
    row("llm.c", "124M, 64 x 1,024", SMALL, "A100-40GB", 1.59e6, replace(LLMC, checkpointing="gelu")),
    row("llm.c", "124M, 64 x 1,024", SMALL, "A100-80GB", 8 * 231e3, LLMC),
    row("llm.c", "124M, 64 x 1,024", SMALL, "H100", 8 * 468e3, LLMC),
    row("llm.c", "350M, 64 x 1,024", PRESETS["gpt2-355m"], "A100-80GB", 8 * 79.9e3, LLMC),
    row("llm.c", "1558M, 16 x 1,024", XL, "H100", 8 * 46.8e3, LLMC_XL, sets="products"),
    lecture("fp32", "T4", 1200, replace(FIRST, precision="fp32"), sets="fp32 share"),
    lecture("fp16", "T4", 460, replace(FIRST, precision="fp16")),
    lecture("and compiled", "T4", 300, replace(T4, attention="explicit")),
    lecture("and FlashAttention", "T4", 260, T4),
    lecture("and fused AdamW", "T4", 250, replace(T4, adamw="fused"), sets="products"),
    lecture("fp32", "A100-80GB", 1000, replace(LECTURE, precision="fp32"), sets="fp32 share"),
    lecture("TF32", "A100-80GB", 333, replace(LECTURE, precision="tf32")),
    lecture("bf16", "A100-80GB", 300, LECTURE, sets="explicit attention"),
    lecture("and compiled", "A100-80GB", 130, replace(COMPILED, attention="explicit")),
    lecture("and FlashAttention", "A100-80GB", 96, COMPILED),
    lecture("and fused AdamW", "A100-80GB", 90, Layout(micro_batch=16), sets="products"),
    composer("1B tokens in 7.1 h", 1e9 / 7.1 / 3600, gpus=8, micro_steps=8),
    composer("20B tokens in 1.5 days", 20e9 / 36 / 3600, gpus=32, micro_steps=2),
    composer("1B tokens in 0.5 h", 1e9 / 0.5 / 3600, gpus=128, micro_batch=2),
    *map(foundry, FOUNDRY.strip().splitlines()),
    row("nanoGPT", "124M, 64 x 1,024", SMALL, "H100", 380e3, Layout(micro_batch=64, micro_steps=8)),
    row("modded", "124M, 64 x 1,024, plain GPT", SMALL, "H200", 488e3, Layout(micro_batch=64, micro_steps=8)),
    row("modded", "124M, 64 x 1,024, plain GPT", SMALL, "H100", 8 * 462e3, Layout(micro_batch=64, gpus=8)),
    row("torchtitan", "LLaMA 3.1 8B, context 8,192", LLAMA, "H100", 8 * 5760, replace(TITAN, program="eager")),
    row("torchtitan", "the same, compiled", LLAMA, "H100", 8 * 6670, TITAN),
]  # fmt: skip


def median_error(rows: list[Published]) -> float:
    errors = sorted(abs(each.error) for each in rows)
    return errors[len(errors) // 2]


def draw_table() -> str:
    """The rows in Markdown."""
    lines = [
        "| source | run | GPUs | published, tokens/s | predicted | error | sets |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in ROWS:
        gpus = f"{each.layout.gpus} x {each.gpu}"
        rates = f"{each.tokens_per_second:,.0f} | {each.predicted:,.0f} | {each.error:+.0%}"
        lines.append(f"| {each.source} | {each.what} | {gpus} | {rates} | {each.sets} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(draw_table())
    print(median_error(ROWS), median_error([each for each in ROWS if not each.sets]))
