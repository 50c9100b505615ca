"""Tokens/s of `generate` beside transformers' on the same weights: `python tests/soak/generate_bench.py`.

gpt2-124m with random weights, one prompt, batch 1, greedy, fp32. The two take turns, so that both see the same machine;
each repeat is checked to give the same ids. `--best` adds what may make transformers faster: eager attention, one
compiled step over a static cache, bf16; and ours in bf16. Ends in one JSON line.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers

from megatoken.device import Device
from megatoken.interop.hf import load_hf
from megatoken.model.decode import turn_weights
from megatoken.sample import generate

Generate = Callable[[int], list[int]]


def theirs(model: Any, prompt: torch.Tensor, **how: Any) -> Generate:
    def run(tokens: int) -> list[int]:
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ids = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                pad_token_id=50256,
                **how,
            )
        return list(ids[0, prompt.shape[1] :].tolist())

    return run


def build_contenders(prompt_tokens: int, best: bool) -> dict[str, Generate]:
    """The two of the claim first; `best` adds variants."""
    torch.manual_seed(0)
    reference = transformers.GPT2LMHeadModel(transformers.GPT2Config()).eval()
    prompt = torch.randint(0, 50257, (1, prompt_tokens))
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        model, _ = load_hf(folder)
        began = time.perf_counter()
        turn_weights(model)
        print(f"turned the weights in {time.perf_counter() - began:.2f} s (not in the figures)", flush=True)
        contenders = {
            "transformers": theirs(reference, prompt),
            "megatoken": lambda tokens: generate(model, prompt[0].tolist(), tokens=tokens, temperature=0)[0],
        }
        if best:
            load = transformers.GPT2LMHeadModel.from_pretrained
            bf16 = Device(place=prompt.device, name="", precision="bf16", peak_flops=0.0, peak_source="unknown")
            compiled = load(folder).eval()
            compiled.forward = torch.compile(compiled.forward)
            contenders |= {
                "transformers eager attention": theirs(load(folder, attn_implementation="eager").eval(), prompt),
                "transformers bf16": theirs(load(folder, dtype=torch.bfloat16).eval(), prompt),
                "transformers compiled, static cache": theirs(compiled, prompt, cache_implementation="static"),
                "megatoken bf16": lambda tokens: generate(
                    model, prompt[0].tolist(), tokens=tokens, temperature=0, device=bf16
                )[0],
            }
    return contenders


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--best", action="store_true")
    wanted = parser.parse_args()
    torch.set_num_threads(wanted.threads)
    contenders = build_contenders(wanted.prompt_tokens, wanted.best)
    expected = contenders["transformers"](wanted.tokens)
    speeds: dict[str, list[float]] = {name: [] for name in contenders}
    for name, run in contenders.items():
        run(8)
        if name == "transformers compiled, static cache":
            run(wanted.tokens)  # other cache sizes compile again
    for repeat in range(wanted.repeats):
        for name, run in contenders.items():
            began = time.perf_counter()
            ids = run(wanted.tokens)
            speeds[name].append(wanted.tokens / (time.perf_counter() - began))
            assert "bf16" in name or ids == expected, f"{name} gives other ids"
            print(f"{repeat}: {name:36s} {speeds[name][-1]:7.1f} tokens/s", flush=True)
    rows = {
        name: {"median": round(statistics.median(s), 1), "lowest": round(min(s), 1), "highest": round(max(s), 1)}
        for name, s in speeds.items()
    }
    print(
        json.dumps(
            {
                "tokens_per_second": rows,
                "ratio_of_medians": round(rows["megatoken"]["median"] / rows["transformers"]["median"], 2),
                "ratio_of_highest": round(rows["megatoken"]["highest"] / rows["transformers"]["highest"], 2),
                "new_tokens": wanted.tokens,
                "prompt_tokens": wanted.prompt_tokens,
                "repeats": wanted.repeats,
                "threads": wanted.threads,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "machine": platform.processor() or platform.machine(),
            }
        )
    )


if __name__ == "__main__":
    main()
