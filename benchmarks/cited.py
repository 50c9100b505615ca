"""Figures that README and docs cite, with the record and the path of each: see figures.py."""

from collections.abc import Callable, Sequence
from functools import partial
from statistics import mean, median
from typing import Any

Answer = dict[str, Any]


def read_speeds(peers: Answer) -> tuple[float, ...]:
    """Return tokens/s of ours, nanoGPT and transformers, and our ratio to the faster."""
    best: dict[str, float] = {}
    for row in peers["rows"]:
        if row["tokens_per_second"]:
            best[row["name"]] = max(best.get(row["name"], 0), row["tokens_per_second"]["median"])
    others = [best[name] for name in ("nanogpt", "transformers") if name in best]
    return best["megatoken"], *others, peers["ratio"]


def read_shares(busy: Answer, name: str) -> list[float]:
    """Return a program's shares of its quiet speed next to 1, 2 and 4 busy processes."""
    rows = [row for row in busy["rows"] if row["name"] == name and row["busy"]]
    return [row["share_of_quiet"]["median"] for row in sorted(rows, key=lambda row: row["busy"])]


def read_bits(quickstart: Answer) -> list[float]:
    return [seed["bits_per_byte"] for seed in quickstart["seeds"]]


def read_medians(answer: Answer, *path: str) -> tuple[float, ...]:
    """Return the medians of the entries of a dictionary in an answer."""
    for key in path:
        answer = answer[key]
    return tuple(entry["median"] for entry in answer.values())


def subtract_losses(race: Answer, contender: int) -> list[float]:
    """Return a contender's final losses above the first contender's, by seed."""
    first, other = race["contenders"][0]["runs"], race["contenders"][contender]["runs"]
    pairs = zip(first, other, strict=True)
    return [run["final_loss"] - start["final_loss"] for start, run in pairs]


def read_amplification(scale: Answer, order: str) -> list[float]:
    return [row["ratio"] for row in scale["rows"] if row["order"] == order]


def read_scores(chat: Answer) -> tuple[float, ...]:
    """Return pass@1 and exact match in percent, each with its standard error."""
    values = []
    for kind in ("sampled", "greedy"):
        values += [100 * chat[kind]["exact_match"], 100 * chat[kind]["standard_error"]]
    return tuple(values)


def read_rewards(hacked: Answer, when: str) -> tuple[float, ...]:
    """Return reward and exact match in percent and tokens per answer, each with its error."""
    values: list[float] = []
    for rule in ("rule", "exact"):
        scored = hacked[when][rule]
        values += [100 * scored["pass_at"]["1"], 100 * scored["stderr"]["pass_at"]["1"]]
    exact = hacked[when]["exact"]
    return *values, exact["tokens"], exact["stderr"]["tokens"]


def read_advantage(race: Answer, what: str) -> tuple[float, ...]:
    """Return the second contender's ratio in tokens or seconds, its range and p."""
    second = race["contenders"][1]
    ratio = second[f"{what}_ratio"]
    return ratio["median"], ratio["low"], ratio["high"], second[f"{what}_p"]


def find_largest_error(gradients: Answer, precision: str, preset: str = "") -> float:
    """Return the largest relative error of the gradients in a precision."""
    return max(
        row["error"]
        for row in gradients["rows"]
        if row["configuration"].startswith(precision) and row["preset"].startswith(preset)
    )


def sum_kernels(profile: Answer, part: str) -> float:
    """Return the milliseconds of the kernels whose names contain `part`."""
    return sum(kernel["milliseconds"] for kernel in profile["kernels"] if part in kernel["name"])


def read_thousands(knob: Answer, keys: Sequence[str]) -> list[float]:
    """Return thousands of tokens/s of some values of a setting."""
    rates = {row["value"]: row["tokens_per_second"]["median"] / 1e3 for row in knob["rows"]}
    return [rates[key] for key in keys]


def read_llmc(runs: Answer) -> list[float]:
    return sorted(round(row["tokens_per_second"], -3) for row in runs["runs"])


def read_family(families: Answer, name: str) -> list[float]:
    """Return the largest differences of a family's exports, those that were measured."""
    row = families["families"][name]
    cells = [row[key] for key in ("transformers", "llama.cpp fp32", "llama.cpp q8_0", "vllm")]
    return [cell for cell in cells if not isinstance(cell, str)]


def read_ladder(ladder: Answer) -> tuple[float, float, float]:
    """Return the lowest and the highest tokens/s of a ladder, and their ratio."""
    rates = [rung["tokens_per_second"] or 0 for rung in ladder["rungs"]]
    return rates[0], max(rates), max(rates) / rates[0]


def summarize_replays(cpu: Answer, gpu: Answer, low: float, high: float) -> list[float]:
    """Return the smallest and largest mean and single differences of replays in a range of means."""
    runs = [run for run in cpu["runs"] + gpu["runs"] if low < run["mean_difference"] < high]
    means = [run["mean_difference"] for run in runs]
    largest = [abs(run["largest_difference"]) for run in runs]
    return [min(means), max(means), min(largest), max(largest)]


def count_loops(loops: Answer) -> tuple[int, int]:
    """Return how many samples loop, and how many there are."""
    runs = [row for name, row in loops.items() if name != "held out"]
    return sum(row["loops"] for row in runs), sum(row["samples"] for row in runs)


def count_kills(soak: Answer) -> int:
    return sum(soak["faults"].values())


def count_found(flips: Answer) -> int:
    return sum(flips[kind]["found"] for kind in ("whole", "sharded", "data"))


def read_millions(loader: Answer) -> float:
    """Return the highest rate of the data loader, in millions of tokens/s."""
    rates = (row["tokens_per_second"]["later_epochs"]["median"] for row in loader["rows"])
    return max(rates) / 1e6


def read_gain(knob: Answer) -> float:
    """Return the gain of a setting's second value over the first."""
    return knob["rows"][1]["gain"] - 1


def no_figures() -> tuple[()]:
    """For texts whose numbers are not measured, or are in no record."""
    return ()


# Rows of docs/recipes.md, by number of the contender.
ABLATIONS = {
    "`optim.name=adamw optim.lr=2e-3` (not tuned)": 13,
    "`model.pos_emb=learned`": 8,
    "`optim.schedule=cosine optim.decay=auto`": 12,
    "`model.tie_embeddings=true`": 10,
    "`model.qk_norm=false`": 1,
    "`model.embedding_norm=false`": 3,
    "`model.mlp=gelu`": 7,
    "`model.zero_init=false`": 2,
    "`model.residual_scales=false`": 4,
    "`model.value_embeddings=false`": 5,
    "`model.logit_softcap=0`": 6,
    "`optim.cautious_decay=false`": 11,
    "`model.norm=layernorm`": 9,
}
GPU_ROWS = (
    ("the default", "{:.0f}", "adamw", "fused"),
    ("full model, not at all", "{:.0f}, {:.0f}, {:.0f}", "compile", "blocks on off"),
    ("in cuBLASLt's matrix product", "{:.0f}, {:.0f}", "gemm-backend", "torch cublaslt"),
    ("`machine.fp8` off, head", "{:.0f}, {:.0f}", "fp8", "off head"),
)
DOCUMENT_STEPS = (
    "documents varlen",
    "window varlen",
    "documents mask",
    "window mask",
    "full plain",
)
# Rows of docs/coming-from.md, by family.
FAMILIES = {
    "LayerNorm, learned positions, GELU, `bias`": "GPT-2",
    "`bias` with `bias_in` all, attention or mlp": "LLaMA 2",
    "as LLaMA 2; `rope_scaling=llama3`": "LLaMA 3",
    "`smollm2-*` | as LLaMA 2": "SmolLM2",
    "| `bias_in=qkv`, `window`": "Qwen2.5",
    "`head_dim`, `bias_in=attention`, `window`": "Qwen3",
    "`nope_interval`, `window`, `bias` as in LLaMA": "SmolLM3",
    "`qk_norm_over=width`, `bias_in=attention`": "OLMo 2",
    "`rope_local_theta`, `logit_softcap`": "Gemma 3",
}
EPILOGUE = "(65536, 768) x (3072, 768)"
SMALL_MODELS = ("random-4x256", "trained-4x256")
SPEEDS = "{:,.0f} | {:,.0f} | {:,.0f} | {:.2f} |"
FIGURES: dict[str, list[tuple[str, str, Callable[..., Any]]]] = {
    "README.md": [
        (
            "mean difference {:.2f} nats, largest {:.2f}",
            "reproduce",
            lambda r: (r["runs"][0]["mean_difference"], abs(r["runs"][0]["largest_difference"])),
        ),
        (
            "0.8M parameters in {:.1f} minutes on two cores, {:.2f} to {:.2f} bits per byte",
            "quickstart",
            lambda r: (
                r["wall_seconds_after_installation"] / 60,
                min(read_bits(r)),
                max(read_bits(r)),
            ),
        ),
        ("xz -9 needs {:.2f} after", "quickstart", lambda r: r["compressors"]["xz -9"]),
        ("run on H200s for 27 minutes", "", no_figures),
        (
            "Gradients differ from a CPU's in fp32 by {:.0e}, and in bf16 by {:.0%} at most",
            "gpu-gradients",
            lambda r: [find_largest_error(r, precision) for precision in ("fp32", "bf16")],
        ),
        (
            "GPT-2 124M trains at {:,.0f} tokens/s",
            "gpu-adamw-124m",
            lambda r: round(r["rows"][0]["tokens_per_second"]["median"], -3),
        ),
        ("llm.c reaches {:,.0f} to {:,.0f}", "gpu-llmc-124m", read_llmc),
        ("CPU, fp32; {} kills", "kills", count_kills),
        (
            "{:.1f}x as fast as nanoGPT compiled with AVX2",
            "peers-avx2",
            lambda r: r["ours"] / read_speeds(r)[1],
        ),
        (
            "trains at {:.0%} of its speed (fair share: {:.0%}; nanoGPT: {:.0%}",
            "busy-quickstart",
            lambda r: (read_shares(r, "megatoken")[0], 2 / 3, read_shares(r, "nanogpt")[0]),
        ),
        (
            "and {:.1f}x to {:.1f}x with AVX512-BF16 in bf16",
            "peers-avx512-bf16-half peers-avx512-bf16-transformers",
            lambda half, full: (half["ratio"], full["ratios"]["nanogpt"]),
        ),
        (
            "with {:.1f}x fewer tokens and in {:.1f}x less time at 10M parameters",
            "race-modern",
            lambda r: [
                r["contenders"][1][key]["median"] for key in ("tokens_ratio", "seconds_ratio")
            ],
        ),
    ],
    "docs/results.md": [
        ("1, 2 and 4 processes killed {} times", "kills", count_kills),
        ("at each of {} system calls", "commit-soak", lambda r: r["points"]),
        ("{:,} of 10,000 found, no false alarm in 1,000 loads", "flips", count_found),
        (
            "{} faults of {} kinds in {:.0f} minutes",
            "chaos",
            lambda r: (r["faults"], len(r["by_fault"]), r["minutes"]),
        ),
        ("{} of {} runs saved", "terminal-soak", lambda r: (r["as_expected"], r["cases"])),
        (
            "1, 2, 3 and 4 processes, 100 steps: losses equal to {:.1e}, and the same bits for 1, 2 and 4",
            "ranks-curves",
            lambda r: r["largest_relative_difference"],
        ),
        (
            "have {:.2f} times the tokens/s of one, with GPT-2 124M in fp32, and a save in the "
            "background stops training for {:.2f} s",
            "ranks-race",
            lambda r: (r["ratio"], r["save_stall_seconds"]),
        ),
        ("| GPT-2 124M, 1 x 1,024 tokens, fp32 | " + SPEEDS, "peers-avx2", read_speeds),
        (
            "| 6 layers of 384, 16 x 256 tokens, 4,096 ids, fp32 | {:,.0f} | {:,.0f} | | {:.2f} |",
            "peers-small-4096-avx2",
            read_speeds,
        ),
        ("1 x 1,024 tokens, bf16 | " + SPEEDS, "peers-avx512-bf16-transformers", read_speeds),
        ("| GPT-2 124M, 4 x 256 tokens, bf16 | " + SPEEDS, "peers-4x256-avx512-bf16", read_speeds),
        (
            "| 6 layers of 384, 16 x 256 tokens, 256 ids, bf16 | " + SPEEDS,
            "peers-small-256-avx512-bf16",
            read_speeds,
        ),
        ("the same, 4,096 ids, bf16 | " + SPEEDS, "peers-small-4096-avx512-bf16", read_speeds),
        ("the same, 50,257 ids, bf16 | " + SPEEDS, "peers-small-50257-avx512-bf16", read_speeds),
        ("85% of our step is matrix products", "", no_figures),
        ("it was {:.2f} for GPT-2 124M", "peers-avx512-bf16-half", lambda r: r["ratio"]),
        (
            "While other programs keep 1, 2 and 4 cores busy, the quickstart's step runs at {:.0%}, "
            "{:.0%} and {:.0%} of its speed",
            "busy-quickstart",
            lambda r: read_shares(r, "megatoken"),
        ),
        (
            "nanoGPT's at {:.0%}, {:.0%} and {:.0%}",
            "busy-quickstart",
            lambda r: read_shares(r, "nanogpt"),
        ),
        ("fair share would be 67%, 50% and 33%", "", no_figures),
        (
            "{:.0f} tokens/s, with 8-bit weights {:.0f}; transformers {:.0f}",
            "generate",
            lambda r: (
                r["tokens_per_second"]["megatoken"]["median"],
                r["tokens_per_second"]["megatoken int8"]["median"],
                max(
                    rate["median"]
                    for name, rate in r["tokens_per_second"].items()
                    if "transformers" in name
                ),
            ),
        ),
        (
            "with 1, 4 and 8 clients, fp32: {:.0f}, {:.0f} and {:.0f} tokens/s",
            "serve",
            lambda r: read_medians(r, "tokens_per_second"),
        ),
        (
            "Tokenizing: {:.1f} MB/s, the `tokenizers` library {:.1f}",
            "prepare",
            lambda r: read_medians(r, "megabytes_per_second"),
        ),
        (
            "1 GB of text needs {} MB of memory",
            "prepare-memory",
            lambda r: r["peak_resident_megabytes"],
        ),
        ("{:.0f} million tokens/s on one core", "loader", read_millions),
        (
            "15T tokens in {:,} sparse shards opens in {:.2f} s of CPU time, with {} read calls and "
            "{:.0f} kB",
            "scale",
            lambda r: (
                r["shards"],
                r["opening"]["cpu_seconds"],
                r["opening"]["read_calls"],
                r["opening"]["bytes"] / 1e3,
            ),
        ),
        (
            "one of 1, 8 or 1,024 ranks reads {:.2f}, {:.2f} and {:.2f} times",
            "scale",
            lambda r: read_amplification(r, "spans"),
        ),
        (
            "with `shuffled`, {:.0f} times",
            "scale",
            lambda r: median(read_amplification(r, "shuffled")),
        ),
        (
            "a run of 100,000 steps: {:.0f} kB, drawn after {:.2f} s",
            "report",
            lambda r: (r["bytes"] / 1e3, r["open_seconds"]),
        ),
        ("GPT-2 124M, {:.0f} to {:.0f} tokens/s, {:.1f} times", "ladder", read_ladder),
        (
            "The quickstart took {:.0f} s. Three seeds end at {:.3f}, {:.3f} and {:.3f} bits",
            "quickstart",
            lambda r: (r["wall_seconds_after_installation"], *read_bits(r)),
        ),
        ("xz -9 needs {:.3f} after", "quickstart", lambda r: r["compressors"]["xz -9"]),
        (
            "ours {:.0f} s, loss {:.3f}; nanoGPT {:.0f} s, loss {:.3f}",
            "character-race",
            lambda r: (*r["rounds"][0]["ours"], *r["rounds"][0]["nanogpt"]),
        ),
        (
            "trl's to {:.1e}, gradients to {:.1e}",
            "trl-oracle",
            lambda r: (
                r["largest_difference"]["grpo_loss"],
                r["largest_difference"]["dpo_gradient"],
            ),
        ),
        (
            "20 steps of GPT-2 124M: losses of {:.4f} and {:.4f}",
            "native-loss",
            lambda r: (r["losses_124m"]["bf16 native"][-1], r["losses_124m"]["fp32"][-1]),
        ),
        ("64 x 1,024 tokens a step, bf16, torch 2.11 with CUDA 13.0", "", no_figures),
        ("differs by some 3% between rows", "", no_figures),
        *(
            (
                f"{row} | {fields} |",
                f"gpu-{record}-124m",
                partial(read_thousands, keys=keys.split()),
            )
            for row, fields, record, keys in GPU_ROWS
        ),
        (
            "| llm.c, half an hour apart | {:.0f}, {:.0f} |",
            "gpu-llmc-124m",
            lambda r: [run["tokens_per_second"] / 1e3 for run in r["runs"]],
        ),
        (
            "differ from a CPU's fp32 gradients by {:.0e} in fp32 (relative L2 norm) and {:.1%} in "
            "bf16 for GPT-2 124M, and by {:.0e} and {:.1%} for llama-110m",
            "gpu-gradients",
            lambda r: [
                find_largest_error(r, precision, preset)
                for preset in ("gpt2-124m", "llama-110m")
                for precision in ("fp32", "bf16")
            ],
        ),
        (
            "100 steps of 131,072 tokens was killed after step 62 and resumed from step 50",
            "",
            no_figures,
        ),
        (
            "The {} steps that ran twice had the same losses to {:.1e}",
            "gpu-journey",
            lambda r: (r["repeated_steps"], r["largest_difference"]),
        ),
        (
            "It trained at {:,.0f} tokens/s, and its first row was logged after {:.0f} s, with {} "
            "micro-batch sizes",
            "gpu-journey",
            lambda r: (round(r["tokens_per_second"], -3), r["first_row_seconds"], len(r["tuning"])),
        ),
        (
            "Where a step of {:.0f} ms goes**: matrix products {:.0f} ms, attention {:.0f} ms, the "
            "loss's kernel {:.1f} ms, GELU {:.0f} ms",
            "gpu-kernels-124m",
            lambda r: (
                r["step_milliseconds"],
                *(sum_kernels(r, part) for part in ("nvjet", "cudnn", "_cross_entropy", "gelu")),
            ),
        ),
        (
            "takes {:.0f} and {:.0f} ms with FlashAttention-2's variable lengths, {:.0f} and {:.0f} "
            "ms with masks, and {:.0f} ms with plain attention",
            "gpu-documents-124m",
            lambda r: [r[f"{part}: ms, GB"][0] for part in DOCUMENT_STEPS],
        ),
    ],
    "docs/recipes.md": [
        ("10M parameters, Python sources, 3 seeds, two CPU cores in bf16", "", no_figures),
        (
            "ends at {:.2f} after {:.1f}M tokens. The modern recipe reaches that loss after {:,.0f}",
            "race-modern",
            lambda r: (
                r["contenders"][0]["final_loss"]["median"],
                r["contenders"][0]["tokens"]["median"] / 1e6,
                round(r["contenders"][1]["tokens"]["median"], -3),
            ),
        ),
        (
            "**{:.1f}x fewer tokens** ({:.1f} to {:.1f}, p {:.4f})",
            "race-modern",
            lambda r: read_advantage(r, "tokens"),
        ),
        (
            "**{:.1f}x less time** ({:.1f} to {:.1f}, p {:.4f})",
            "race-modern",
            lambda r: read_advantage(r, "seconds"),
        ),
        ("0.2 tokens per parameter", "", no_figures),
        ("others published a factor of 6.0 to a loss of 3.28", "", no_figures),
        ("after 200,000 tokens with one ingredient removed, two seeds", "", no_figures),
        ("differ by 0.02; differences within a seed agree to 0.03, Muon's to 0.08", "", no_figures),
        *(
            (
                f"{setting} | {{:+.3f}}, {{:+.3f}}",
                "race-ablation",
                partial(subtract_losses, contender=index),
            )
            for setting, index in ABLATIONS.items()
        ),
        ("no effect in 49 steps", "", no_figures),
        (
            "together gain {:.3f} nats after 160 steps of a smaller model (three seeds, p {:.3f}",
            "race-smear",
            lambda r: (-mean(subtract_losses(r, 3)), r["contenders"][3]["loss_p"]),
        ),
        (
            "values of the momentum to about 1 by five Newton-Schulz iterations, times sqrt(max(1,",
            "",
            no_figures,
        ),
        (
            "costs {:.1%} more than AdamW's for GPT-2 124M and 65,536 tokens",
            "muon-overhead",
            lambda r: r["share"],
        ),
        (
            "{:.3f} nats less at the start of training",
            "race-recipe",
            lambda r: -mean(subtract_losses(r, 1)),
        ),
        (
            "{:.3f} to {:.3f} less after the quickstart",
            "race-equal-rows",
            lambda r: sorted(-loss for loss in subtract_losses(r, 1))[::2],
        ),
        ("p {:.2f}), so no recipe", "race-equal-rows", lambda r: r["contenders"][1]["loss_p"]),
        (
            "Over widths of 32, 64 and 128, Muon's best `matrix_lr` is {:.3f}, {:.3f} and {:.3f}, a "
            "factor of {:.2f}; AdamW's best rate falls by a factor of {:.1f}",
            "muon-sweep",
            lambda r: (
                *(width["best_rate"] for width in r["sweep"]["muon"].values()),
                r["largest_by_smallest"]["muon"],
                1 / r["largest_by_smallest"]["adamw"],
            ),
        ),
    ],
    "docs/chat.md": [
        (
            "Of the {} templates that trl 1.16 and llama-cpp-python 0.3.36 ship, {} are refused; of "
            "{:,} conversations that the others render, {:,} are right, {} are refused",
            "templates",
            lambda r: (
                r["total"]["templates"],
                len(r["refused"]),
                r["total"]["right"] + r["total"]["right, as in training"] + r["total"]["refused"],
                r["total"]["right"] + r["total"]["right, as in training"],
                r["total"]["refused"],
            ),
        ),
        ("{} held-out exercises", "rl-answers", lambda r: r["start"]["greedy"]["prompts"]),
        ("sampled, pass@1", "", no_figures),
        (
            "| SFT for {:.0f} s | {:.1f}% ± {:.1f} | {:.1f}% ± {:.1f}",
            "rl-answers",
            lambda r: (r["start"]["seconds"], *read_scores(r["start"])),
        ),
        (
            "then GRPO for {:.0f} s, {} steps | {:.1f}% ± {:.1f} | {:.1f}% ± {:.1f}",
            "rl-answers",
            lambda r: (r["grpo"][0]["seconds"], r["grpo"][0]["steps"], *read_scores(r["grpo"][0])),
        ),
        (
            "or more SFT for {:.0f} s | {:.1f}% ± {:.1f} | {:.1f}% ± {:.1f}",
            "rl-answers",
            lambda r: (r["sft"]["seconds"], *read_scores(r["sft"])),
        ),
        ("After {} steps of GRPO with it", "hacked-reward", lambda r: r["steps"]),
        *(
            (
                f"| {when} | {{:.1f}}% ± {{:.1f}} | {{:.1f}}% ± {{:.1f}} | {{:.1f}} ± {{:.1f}} |",
                "hacked-reward",
                partial(read_rewards, when=when),
            )
            for when in ("before", "after")
        ),
        ("others get status 429", "", no_figures),
        (
            "Eight clients get {:.1f} times the tokens/s of one",
            "serve",
            lambda r: r["ratio_to_one_client"]["8"]["median"],
        ),
        (
            "with {} such tokens its answer begins {:.1f} times as soon",
            "serve",
            lambda r: (
                r["contexts"][0]["cached_tokens_reused"],
                median(r["contexts"][0]["first_token_seconds_new"])
                / median(r["contexts"][0]["first_token_seconds_reused"]),
            ),
        ),
        (
            "On {} conversations, vLLM 0.32",
            "vllm-route",
            lambda r: min(r[key] for key in ("conversations", "same_prompt_ids", "same_text")),
        ),
    ],
    "docs/evaluation.md": [
        (
            "On random and trained 4-layer models, our choices equal the harness's in {} of 500 "
            "examples, at {:.1f} to {:.1f} times its speed",
            "harness",
            lambda r: (
                min(r["races"][name]["agree"]["pred"] for name in SMALL_MODELS),
                *sorted(
                    r["races"][name]["times_as_fast"]["acc, acc_norm"] for name in SMALL_MODELS
                ),
            ),
        ),
        ("acc 28.92 and acc_norm 31.14 by the harness, acc_token_mean 29.55", "", no_figures),
    ],
    "docs/numbers.md": [
        (
            "give L = {:.2f} + {:.0f} / N^{:.2f} + {:.1f} / D^{:.2f}; the largest, left out, is "
            "predicted to {:.1%}",
            "scaling",
            lambda r: (
                r["fits"]["E"]["value"],
                r["factors"][0],
                r["fits"]["exponent of N"]["value"],
                r["factors"][1],
                r["fits"]["exponent of D"]["value"],
                r["held_out"]["error_share"],
            ),
        ),
        (
            "The ranges of E ({:.0f} to {:.1f}) and of N's exponent ({:.2f} to {:.1f})",
            "scaling",
            lambda r: [
                r["fits"][name][end] for name in ("E", "exponent of N") for end in ("low", "high")
            ],
        ),
    ],
    "docs/plan.md": [
        ("GPT-2 124M, 64 x 1,024, takes 22.06 GB", "", no_figures),
        (
            "and took {:.2f} GB on an H200",
            "gpu-adamw-124m",
            lambda r: r["rows"][0]["peak_memory_bytes"] / 1e9,
        ),
        ("hidden communication | {:.0%}", "ranks-overlap", lambda r: r["share"]),
        (
            "the planned time was {:.2f} times the time of the next run ({:.2f} to {:.2f}), and "
            "the planned memory {:.2f} times ({:.2f} to {:.2f})",
            "plan",
            lambda r: (*r["ratios"]["all"]["after"], *r["ratios"]["all"]["memory"]),
        ),
    ],
    "docs/scaling-up.md": [
        (
            "to {:.1e} in 100 steps on 1 to 4 processes",
            "ranks-curves",
            lambda r: r["largest_relative_difference"],
        )
    ],
    "docs/coming-from.md": [
        *(
            (
                f"{row} | {{:.0e}} | {{:.0e}}, {{:.0e}} | {{:.0e}} |",
                "families",
                partial(read_family, name=name),
            )
            for row, name in FAMILIES.items()
        ),
        (
            "`window` in all layers, or none | {:.0e} | – | {:.0e} |",
            "families",
            partial(read_family, name="Mistral"),
        ),
        ("windows in families other than Gemma 3 (Mistral 7B v0.1)", "", no_figures),
    ],
    "docs/decisions.md": [
        (
            "{:.0%} of the reduction overlaps with the backward",
            "ranks-overlap",
            lambda r: r["share"],
        ),
        ("trained GPT-2 124M only {:.1%} faster on", "gpu-adamw-124m", read_gain),
        (
            "At 65,536 x 768 -> 3,072 in bf16, the product with GELU takes {:.3f} ms, torch's two "
            "kernels {:.3f}",
            "gpu-epilogues",
            lambda r: [r[f"GELU {EPILOGUE} x (3072,)"][key] for key in ("ms", "torch ms")],
        ),
        ("GPT-2 124M trains {:.1%} faster", "gpu-gemm-backend-124m", read_gain),
        (
            "sum a bias's gradient are slower: {:.3f} instead of {:.3f} ms",
            "gpu-epilogues",
            lambda r: [
                r["bias gradient (65536, 2304) x (65536, 768)"][key] for key in ("ms", "torch ms")
            ],
        ),
        ("fusing GELU gave 871 tokens/s and a separate pass 911", "", no_figures),
        ("Windows of 1,024 tokens come at {:.0f} million tokens/s", "loader", read_millions),
        ("about 20% of a load from the page cache", "", no_figures),
        ("{:,} of 10,000 flipped bits were found", "flips", count_found),
        (
            "{} of {} texts",
            "serve",
            lambda r: (r["texts_compared"] - r["texts_that_differ"], r["texts_compared"]),
        ),
        (
            "GPT-3 175B on 1,024 H100s needs {}% of their usable memory",
            "dryrun",
            lambda r: r["advice"].split("%")[0].split()[-1],
        ),
        ("it trains GPT-2 124M {:.1%} faster, and no faster", "gpu-fp8-124m", read_gain),
        ("move 71.5 tensors of its width instead of 54", "", no_figures),
        ("the full model is {:.1%} faster on one GPU", "gpu-compile-124m", read_gain),
        (
            "by {:.3f}, {:.3f} and {:.3f}, but the spread between seeds is as large (p {:.2f}",
            "race-equal-rows",
            lambda r: (*(-loss for loss in subtract_losses(r, 1)), r["contenders"][1]["loss_p"]),
        ),
        (
            "In 160 steps it gains {:.3f} nats (p {:.4f}), as much as NorMuon ({:.3f})",
            "race-recipe",
            lambda r: (
                -mean(subtract_losses(r, 1)),
                r["contenders"][1]["loss_p"],
                -mean(subtract_losses(r, 2)),
            ),
        ),
        ("changed nothing (p {:.2f})", "race-recipe", lambda r: r["contenders"][4]["loss_p"]),
        ("needs a hash block of 64 KiB", "", no_figures),
        (
            "reads {:.0f} times the bytes it uses from data that does not fit in memory, and `spans` "
            "{:.2f} times",
            "scale",
            lambda r: (
                median(read_amplification(r, "shuffled")),
                read_amplification(r, "spans")[0],
            ),
        ),
        ("eight windows of 128 tokens per file, with 7% of the data in use", "", no_figures),
        (
            "three seeds end at {:.3f} with `shuffled` and at {:.3f} with `spans` (p {:.3f}",
            "race-order",
            lambda r: (
                *(mean(run["final_loss"] for run in each["runs"]) for each in r["contenders"]),
                r["contenders"][1]["loss_p"],
            ),
        ),
    ],
    "docs/reproduce.md": [
        (
            "mean differences {:.2f} to {:.2f} nats, largest {:.2f} to {:.2f}",
            "reproduce gpu-reproduce",
            partial(summarize_replays, low=0.0, high=0.2),
        ),
        (
            "five runs, mean {:.2f} to {:.2f}, largest {:.2f} to {:.2f}",
            "reproduce gpu-reproduce",
            partial(summarize_replays, low=0.2, high=1.0),
        ),
        (
            "442,553 | 496,322 | {:,.0f} on an H200",
            "gpu-adamw-124m",
            lambda r: round(r["rows"][0]["tokens_per_second"]["median"], -3),
        ),
        ("**16 bits without a loss scale.**", "", no_figures),
        (
            "ours is within {:.2f} nats of theirs",
            "gpu-reproduce-unscaled",
            lambda r: abs(r["runs"][0]["largest_difference"]),
        ),
        (
            "Its last run, of 524,288 tokens per step, stalls at 7.85 and ours ends at 5.74",
            "",
            no_figures,
        ),
    ],
    "docs/your-own-text.md": [
        (
            "`--temperature 0.7` is more careful, but a small model then repeats itself: from the "
            "quickstart, {} of {} samples loop at 0.8",
            "loops-0.8",
            count_loops,
        ),
        ("and {} of {} at 1, the default", "loops", count_loops),
    ],
}
