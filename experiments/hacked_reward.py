"""Train with GRPO on a reward that pays for the wrong thing, and watch the exact match.

    python -m experiments.hacked_reward --base RUN --state FOLDER [--sft-steps 320] [--steps 80]

RUN, a pre-trained run, is fine-tuned on `exercises` until it is sometimes right; from there GRPO
trains by the rule `completion in answer`. Both are measured on held-out exercises. --state keeps
results. Takes two to three minutes on one core and prints one JSON line.
"""

import argparse
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from experiments.rl_answers import GRPO, start
from experiments.sft_answers import train_for
from megatoken.base.system.metrics_log import read_metrics
from megatoken.distributed.comm import Comm
from megatoken.distributed.env import DistEnv
from megatoken.inference.answers import AnswerSettings, evaluate_answers, read_questions
from megatoken.inference.rewards import load_reward
from megatoken.inference.sampling import Sampling
from megatoken.text.load_pretrained import load_pretrained

LIMIT_SECONDS = 120  # of each training
RULE = "experiments.hacked_reward:pay_for_parts"


def pay_for_parts(prompt: str, completion: str, answer: str) -> float:
    """Return 1 if the completion is part of the answer. Meant as "is right", but "" also pays."""
    return float(completion in answer)


def measure(run: Path, prompts: int) -> dict[str, Any]:
    """Return the rule's score and exact match, greedy (score) and sampled (pass_at), with standard
    errors.
    """
    loaded = load_pretrained(run)
    questions = read_questions("exercises-test", prompts)
    ask = partial(evaluate_answers, loaded, None, Comm(DistEnv()), questions)
    settings = AnswerSettings(samples=1, sampling=Sampling(48))
    exact = ask(replace(settings, per_example=True))
    answers = [
        {key: row[key] for key in ("prompt", "right", "answer")}
        for row in exact.pop("examples")[:6]
    ]
    return {
        "rule": ask(replace(settings, reward=load_reward(RULE), reward_name=RULE)),
        "exact": exact,
        "answers": answers,
    }


def run() -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--base", required=True)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--sft-steps", type=int, default=320)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--prompts", type=int, default=400)
    options = parser.parse_args()
    sft, out = options.state / "sft", options.state / "hacked"
    start(options.base, options.state, LIMIT_SECONDS, f"budget.steps={options.sft_steps}")
    before = measure(sft, options.prompts)
    overrides = [*GRPO, f"data.path={options.state / 'prompts'}", "--reward", RULE]
    overrides += [f"budget.steps={options.steps}", "budget.batch_tokens=16384"]
    trained = train_for(LIMIT_SECONDS, "grpo", str(sft), out, overrides)
    rows = [row for row in read_metrics(out) if row["kind"] == "train"]
    curves = {name: [row[name] for row in rows] for name in ("reward", "answer_tokens")}
    return trained | curves | {"before": before, "after": measure(out, options.prompts)}


if __name__ == "__main__":
    print(json.dumps(run()))
