"""Compare GRPO with fine-tuning of the same duration, from the same model.

    python -m experiments.rl_answers --base RUN --state FOLDER [--sft-seconds 90] [--seconds 240]

RUN, a pre-trained run, is fine-tuned on `exercises` for --sft-seconds. From there GRPO trains on
`exercises-prompts` by the reward `exact`, and fine-tuning continues, each for --seconds. Measures
exact match on held-out exercises, greedy and sampled (pass@1), with standard errors. --state keeps
results. Takes fifteen minutes on two cores and prints one JSON line.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from experiments.sft_answers import score, train_for
from megatoken.base.errors import ExitCode
from megatoken.base.system.metrics_log import read_metrics
from megatoken.cli.main import main
from megatoken.text.exercises import list_exercises
from megatoken.text.load_pretrained import load_pretrained

SFT = ["budget.epochs=0", "budget.steps=100000", "budget.batch_tokens=2048"]
SFT += ["optim.lr=1.5e-3", "optim.schedule=constant", "optim.warmup=50steps"]
GRPO = ["budget.steps=100000", "objective.max_new_tokens=48", "evaluate.every=100steps"]


def measure(run: Path, prompts: int) -> dict[str, Any]:
    """Return the exact match of a run's model on held-out exercises."""
    loaded = load_pretrained(run)
    exercises = list_exercises(held_out=True)[:prompts]
    return {
        name: score(loaded.model.eval(), loaded.tokenizer, exercises, temperature)
        for name, temperature in (("greedy", 0.0), ("sampled", 1.0))
    }


def start(base: str, state: Path, seconds: int, *overrides: str) -> dict[str, Any]:
    """Prepare conversations and prompts in `state`, and fine-tune the run state/sft."""
    for source, data in (("exercises", "chats"), ("exercises-prompts", "prompts")):
        assert (
            main(["prepare", source, "--out", str(state / data), "--tokenizer", base])
            == ExitCode.DONE
        )
    return train_for(
        seconds, "sft", base, state / "sft", [*SFT, f"data.path={state / 'chats'}", *overrides]
    )


def run() -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--base", required=True)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--sft-seconds", type=int, default=90)
    parser.add_argument("--seconds", type=int, default=240)
    parser.add_argument("--seeds", type=int, default=1, help="of GRPO")
    parser.add_argument("--prompts", type=int, default=400)
    parser.add_argument("overrides", nargs="*", help="section.field=value of GRPO")
    options = parser.parse_args()
    state: Path = options.state
    sft, more = state / "sft", state / "more-sft"
    trained = start(options.base, state, options.sft_seconds)
    result: dict[str, Any] = {"start": trained | measure(sft, options.prompts)}
    chat_overrides = [*SFT, f"data.path={state / 'chats'}"]
    result["sft"] = train_for(options.seconds, "sft", str(sft), more, chat_overrides) | measure(
        more, options.prompts
    )
    result["grpo"] = []
    for seed in range(options.seeds):
        out = state / f"grpo-{seed}"
        overrides = [*GRPO, f"data.path={state / 'prompts'}", f"seed={seed}", *options.overrides]
        trained = train_for(options.seconds, "grpo", str(sft), out, overrides)
        rewards = [row["reward"] for row in read_metrics(out) if row["kind"] == "train"]
        result["grpo"].append(trained | {"rewards": rewards} | measure(out, options.prompts))
    return result


if __name__ == "__main__":
    print(json.dumps(run()))
