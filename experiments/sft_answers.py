"""Fine-tune for minutes, and measure exact match on held-out exercises before and after.

    python -m experiments.sft_answers --base RUN --state FOLDER --seconds 180

Trains on the source `exercises` and asks the prompts of `exercises-test`; they have no problem in
common. With more --seconds, a second call continues. Prints one JSON line.
"""

import argparse
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatoken.base.errors import ExitCode
from megatoken.base.system.metrics_log import read_metrics
from megatoken.cli.main import main
from megatoken.inference.batch import BatchDecoder, Request
from megatoken.inference.sampling import Sampling
from megatoken.model.gpt import GPT
from megatoken.posttrain.new_tokens import VOCABULARY_TABLES, add_mean_rows
from megatoken.text.chat_template import Message, add_control_tokens, find_template
from megatoken.text.exercises import Exercise, list_exercises
from megatoken.text.load_pretrained import load_pretrained
from megatoken.text.tokenizer import Tokenizer

AT_ONCE = 50  # prompts


def grow(model: GPT, old: Tokenizer, new: Tokenizer) -> GPT:
    """Return the model with rows for the control tokens, as at the start of fine-tuning."""
    grown = GPT(
        replace(model.config, vocab_size=max(model.config.vocab_size, new.vocab_size)), seed=None
    )
    state = {
        name: add_mean_rows(values, old.vocab_size, new.vocab_size, grown.config)
        if name.endswith(VOCABULARY_TABLES)
        else values
        for name, values in model.state_dict().items()
    }
    grown.load_state_dict(state)
    return grown.eval()


def score(
    model: GPT, tokenizer: Tokenizer, exercises: list[Exercise], temperature: float
) -> dict[str, Any]:
    """Return the share of right answers, the share that stop by themselves, and tokens per answer."""
    template = find_template(tokenizer)
    right, stopped, lengths = {"sums": [], "spelling": []}, 0, []
    for first in range(0, len(exercises), AT_ONCE):
        chosen = exercises[first : first + AT_ONCE]
        requests = [
            Request(
                template.encode([Message("user", each.question)], reply=True)[0],
                Sampling(
                    max_new_tokens=48,
                    temperature=temperature,
                    seed=first + number,
                    stop_ids=template.stop_ids,
                ),
            )
            for number, each in enumerate(chosen)
        ]
        answers: list[list[int]] = [[] for _ in chosen]
        with BatchDecoder(
            model, rows=len(chosen), capacity=max(r.capacity for r in requests)
        ) as decoder:
            for number, request in enumerate(requests):
                decoder.add(number, request)
            while decoder.rows:
                for token in decoder.step():
                    if token.finish_reason == "stop":
                        stopped += 1
                    else:
                        answers[token.row].append(token.id)
        for each, ids in zip(chosen, answers, strict=True):
            kind = "sums" if "+" in each.key else "spelling"
            right[kind].append(tokenizer.decode(ids).strip() == each.answer)
            lengths.append(len(ids))
    all_right = right["sums"] + right["spelling"]
    share = sum(all_right) / len(all_right)
    return {
        "exact_match": share,
        "standard_error": math.sqrt(share * (1 - share) / len(all_right)),
        **{name: sum(values) / max(1, len(values)) for name, values in right.items()},
        "stopped_by_themselves": stopped / len(exercises),
        "mean_tokens": sum(lengths) / len(lengths),
        "prompts": len(exercises),
    }


def train_for(
    seconds: int, recipe: str, base: str, out: Path, overrides: list[str]
) -> dict[str, Any]:
    """Train from `base` for some seconds of the run's own time; return steps, tokens and seconds."""
    before = (
        max((row["elapsed_seconds"] for row in read_metrics(out)), default=0.0)
        if out.exists()
        else 0.0
    )
    if before < seconds:
        limit = f"save.time_limit={max(5, round(seconds - before))}s"
        # A process of its own: the command sets up the environment before torch is loaded.
        command = [
            sys.executable,
            "-m",
            "megatoken",
            "train",
            recipe,
            "--init",
            base,
            "--out",
            str(out),
            *overrides,
            limit,
        ]
        code = subprocess.run(command, stdout=sys.stderr).returncode
        assert code in (ExitCode.DONE, ExitCode.STOPPED)
    rows = read_metrics(out)
    last = [row for row in rows if row["kind"] == "train"][-1]
    elapsed = max(row["elapsed_seconds"] for row in rows)
    return {"steps": last["step"], "tokens": last["tokens"], "seconds": elapsed}


def run() -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--base", required=True)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--seconds", type=int, default=180)
    parser.add_argument("--prompts", type=int, default=400)
    parser.add_argument("overrides", nargs="*", help="section.field=value")
    options = parser.parse_args()
    data, out = options.state / "chats", options.state / "run"
    assert (
        main(["prepare", "exercises", "--out", str(data), "--tokenizer", options.base])
        == ExitCode.DONE
    )
    trained = train_for(
        options.seconds, "sft", options.base, out, [f"data.path={data}", *options.overrides]
    )
    exercises = list_exercises(held_out=True)[: options.prompts]
    base, tuned = load_pretrained(options.base), load_pretrained(out)
    control = add_control_tokens(base.tokenizer)
    return {
        "parameters": sum(p.numel() for p in tuned.model.parameters()),
        **trained,
        "threads": torch.get_num_threads(),
        "val_losses": [row["loss"] for row in read_metrics(out) if row["kind"] == "val"],
        "before": score(grow(base.model, base.tokenizer, control), control, exercises, 0.0),
        "after": score(tuned.model.eval(), tuned.tokenizer, exercises, 0.0),
        "after_sampled": score(tuned.model.eval(), tuned.tokenizer, exercises, 1.0),
    }


if __name__ == "__main__":
    print(json.dumps(run()))
