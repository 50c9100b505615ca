"""`megatoken eval`: evaluate a model; prints a table, returns the dictionary for --json."""

from argparse import Namespace
from collections.abc import Callable
from typing import Any

from megatoken.config.schema import MachineConfig
from megatoken.console import Console
from megatoken.convert.hf.load import refuse_missing_path
from megatoken.convert.load_pretrained import LoadedModel, load_pretrained
from megatoken.distributed.comm import Comm, join_process_group
from megatoken.distributed.env import read_dist_env
from megatoken.eval.evaluate import evaluate
from megatoken.eval.multiple_choice import SCORES, describe_cut, format_score
from megatoken.eval.tasks import find_tasks, read_examples
from megatoken.system.device import Device, memory_errors, open_device

Evaluation = Callable[[Namespace, LoadedModel, Device, Comm, Console], dict[str, Any]]


@memory_errors("eval", "use --precision bf16 or --device cpu")
def evaluate_model(options: Namespace, run_harness: Evaluation | None = None) -> dict[str, Any] | None:
    """Load the model and evaluate it, by lm-evaluation-harness if given. None on every rank but the first."""
    refuse_missing_path(options.model)
    own_tasks = options.tasks and not run_harness
    # Examples are read and checked before the model is loaded.
    tasks = read_examples(find_tasks(options.tasks), options.data, options.limit) if own_tasks else {}
    dist_env = read_dist_env()
    console = Console(to_stderr=options.json, quiet=not dist_env.is_main_process)
    machine = MachineConfig(device=options.device, precision=options.precision)
    device = open_device(machine, local_rank=dist_env.local_rank, local_world_size=dist_env.local_world_size)
    with join_process_group(dist_env, device.type) as comm:
        loaded = load_pretrained(options.model, console.warn)
        loaded.model.to(device.torch_device)
        if run_harness:
            result = run_harness(options, loaded, device, comm, console)
        else:
            result = evaluate(
                loaded.model,
                loaded.tokenizer,
                tasks=tasks,
                data=options.data,
                limit=options.limit,
                split=options.split,
                token_mean=not options.no_token_mean,
                per_example=options.examples,
                device=device,
                comm=comm,
            )
            if not options.json:
                (print_tasks if tasks else print_loss)(result, console)
    return {"model": loaded.source, **result} if dist_env.is_main_process else None


def print_tasks(result: dict[str, Any], console: Console) -> None:
    """One line per task: scores in percent with their standard errors."""
    width = max(map(len, result["tasks"])) + 2
    console.print(f"{'task':<{width}}{'n':>7}" + "".join(f"{score:>18}" for score in SCORES))
    for name, metrics in result["tasks"].items():
        scores = "".join(f"{format_score(metrics, score):>18}" for score in SCORES)
        perplexity = f"   perplexity {metrics['perplexity']:.2f}" if "perplexity" in metrics else ""
        console.print(f"{name:<{width}}{metrics['n']:>7,}{scores}{perplexity}{describe_cut(metrics)}")


def print_loss(result: dict[str, Any], console: Console) -> None:
    over = f"{result['target_tokens']:,} tokens, {result['text_bytes']:,} bytes of text, "
    loss = f"{result['loss']:.4f} nats per token, perplexity {result['perplexity']:.3f}"
    bits = result["bits_per_byte"]
    rows = [("loss", loss), ("bits per byte", "no token is text" if bits is None else f"{bits:.4f}")]
    console.table([*rows, ("over", f"{over}{result['split']} of {result['data']}")])
