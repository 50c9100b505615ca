"""`megatoken eval MODEL...`: score models on tasks, questions or text."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatoken.base.config.schema import MachineConfig
from megatoken.base.console import Console, format_quantity
from megatoken.base.errors import ConfigError
from megatoken.base.pictures import check_picture, draw, line, number, panel
from megatoken.base.published import SCORES as PUBLISHED_SCORES
from megatoken.base.rooms import list_entries
from megatoken.base.system.address import is_address
from megatoken.cli import Data, Result
from megatoken.cli.arguments import add_options
from megatoken.cli.ranks import launch_ranks
from megatoken.distributed.env import read_dist_env
from megatoken.inference.rewards import load_reward
from megatoken.inference.tasks import CORE, SCORES, find_tasks
from megatoken.model.flops import count_parameters
from megatoken.store.run_state import find_own_data

if TYPE_CHECKING:
    from megatoken.base.system.device import Device
    from megatoken.distributed.comm import Comm
    from megatoken.text.load_pretrained import LoadedModel

    Evaluation = Callable[[LoadedModel, Device, Comm], dict[str, Any]]

HELP = "score models on tasks, or compute their loss"
EXAMPLE = "megatoken eval runs/mine --tasks hellaswag"
HELLASWAG = "hellaswag"
Model = tuple[str, Mapping[str, Any]]  # a name, and the result of the evaluation
PUBLISHED: list[Model] = [  # on all 10,042 examples
    (
        row.title.replace(", published", ",\npublished"),
        {
            "parameters": row.parameters,
            "tasks": {HELLASWAG: asdict(row) | {"n": 10_042, "stderr": dict.fromkeys(SCORES)}},
        },
    )
    for row in PUBLISHED_SCORES
]


def add_arguments(parser: ArgumentParser) -> None:
    names = {f"{kind}s": ", ".join(list_entries(kind)) for kind in ("task", "reward")}
    add_options(parser, __file__, core=CORE, **names)


def run(options: Namespace, console: Console) -> Result | Data | None:
    if options.limit < 0:
        raise ConfigError(f"--limit is {options.limit}", "--limit", "give 0 or more")
    if options.tasks is None and not (options.data or options.chat or options.harness):
        options.data = find_own_data(options.models)
        if not options.data:
            fix = "give --tasks, --data or --chat"
            raise ConfigError("nothing to evaluate on", "megatoken eval", fix)
        console.print(f"data: {options.data}, which the run was trained on")
    if options.tasks not in (None, CORE) and not options.harness:
        find_tasks(options.tasks)
    code = launch_ranks(options)
    if code is not None:
        return Result(code, None)
    from megatoken.base.system.device import memory_errors

    with memory_errors("eval", "use --precision bf16 or --device cpu"):
        return evaluate_models(options)


def choose_evaluation(options: Namespace, console: Console) -> "Evaluation":
    """Read and check the examples, and return the function that evaluates a model on them."""
    if options.chat:
        return prepare_questions(options)
    if options.harness:
        from megatoken.inference.lm_eval_adapter import run_harness

        return partial(run_harness, options=options, console=console)
    from megatoken.inference.evaluate import evaluate_loss, evaluate_tasks, read_tasks

    if not options.tasks:
        data = {name: getattr(options, name) for name in ("data", "limit", "split")}
        return partial(evaluate_loss, **data)
    return partial(
        evaluate_tasks,
        tasks=read_tasks(options.tasks, options.data, options.limit),
        token_mean=not options.no_token_mean,
        per_example=options.examples,
    )


def prepare_questions(options: Namespace) -> "Evaluation":
    """Read the questions of --chat, and return a function that scores a model's answers to them."""
    from megatoken.inference.answers import AnswerSettings, evaluate_answers, read_questions
    from megatoken.inference.sampling import Sampling

    reward = load_reward(options.reward)
    sampling = Sampling(options.tokens, options.temperature)
    settings = AnswerSettings(
        reward, options.reward, options.samples, sampling, per_example=options.examples
    )
    questions = read_questions(options.chat, options.limit)

    def evaluate(loaded: "LoadedModel", device: "Device", comm: "Comm") -> dict[str, Any]:
        result = evaluate_answers(loaded, device, comm, questions, settings)
        return {"chat": result | {"data": options.chat}}

    return evaluate


def evaluate_models(options: Namespace) -> Data | None:
    """Load and evaluate each model. Only rank 0 prints results and returns them as data.

    For a single model, the data is its scores. For several, it is {"models": [...]}, with the
    scores and `parameters` of each.
    """
    from megatoken.base.system.device import open_device
    from megatoken.distributed.comm import join_process_group
    from megatoken.store.pretrained import find_weights
    from megatoken.text.load_pretrained import load_pretrained

    dist_env = read_dist_env()
    console = Console(to_stderr=options.json, quiet=not dist_env.is_main_process)
    for name in options.models:
        if not is_address(name):
            find_weights(name, console.warn)  # refuses a missing path
    if options.plot:
        check_picture(options.plot)
    evaluate_model = choose_evaluation(options, console)
    device = open_device(
        MachineConfig(device=options.device, precision=options.precision),
        local_rank=dist_env.local_rank,
        local_world_size=dist_env.local_world_size,
    )
    results: list[dict[str, Any]] = []
    with join_process_group(dist_env, device.type) as comm:
        for name in options.models:
            loaded = load_pretrained(name, console.warn)
            loaded.model.to(device.torch_device)
            about = {"model": loaded.source, "parameters": count_parameters(loaded.model.config)}
            results.append(about | evaluate_model(loaded, device, comm))
    if not dist_env.is_main_process:
        return None
    models: list[Model] = list(zip(options.models, results, strict=True))
    if HELLASWAG in results[0].get("tasks", ()):
        models += PUBLISHED
    if not options.json and not options.harness:
        print_results(models, console)
    if options.plot:
        console.print(f"picture: {draw_scores(models, options.plot)}")
    if len(results) > 1:
        return {"models": results}
    del results[0]["parameters"]
    return results[0]


def print_results(models: Sequence[Model], console: Console) -> None:
    """Print the scores of all models: for tasks, for text, or for answers to questions."""
    first = models[0][1]
    if "chat" in first:
        from megatoken.inference.answers import describe_answers

        for _, result in models:
            console.table([("model", result["model"]), *describe_answers(result["chat"])])
        return
    has_tasks = "tasks" in first
    if has_tasks:
        heads = ["task", "n", *SCORES, ""]
    else:
        heads = ["data", "loss", "bits/byte", "perplexity", "tokens", "bytes"]
    rows = [["model", "parameters", *heads]]
    for name, result in models:
        lines = list_task_cells(result) if has_tasks else [list_loss_cells(result)]
        rows += [[name, f"{result['parameters']:,}", *cells] for cells in lines]
    console.table(rows, left=3)


def list_task_cells(result: Mapping[str, Any]) -> list[list[str]]:
    """Return a row of table cells per task: scores in percent with standard errors, and remarks.

    result: of the evaluation of a model.
    """
    from megatoken.inference.multiple_choice import describe_cut, format_score

    rows = []
    for task, metrics in result["tasks"].items():
        scores = [format_score(metrics, score) for score in SCORES]
        remark = describe_cut(metrics).removeprefix(", ")
        if "perplexity" in metrics:
            remark = f"perplexity {metrics['perplexity']:.2f} {remark}"
        if CORE in result:
            remark = f"centered {metrics['centered']:.2%} {remark}"
        rows.append([task, f"{metrics['n']:,}", *scores, remark])
    if CORE in result:
        rows.append([CORE, "", "", "", "", f"centered {result[CORE]:.2%}"])
    return rows


def list_loss_cells(result: Mapping[str, Any]) -> list[str]:
    """Return the table cells of a loss: data, nats per token, bits per byte, perplexity, counts."""
    bits = result["bits_per_byte"]
    return [
        f"{result['split']} of {result['data']}",
        f"{result['loss']:.4f}",
        "-" if bits is None else f"{bits:.4f}",
        f"{result['perplexity']:.3f}",
        f"{result['target_tokens']:,}",
        f"{result['text_bytes']:,}",
    ]


def draw_scores(models: Sequence[Model], target: Path) -> Path:
    """Plot scores in a panel per task, with a row per model, the smallest first; return the path.

    Without tasks, there are two panels, for loss and bits per byte.
    """
    tasks = models[0][1].get("tasks", ())
    models = sorted(models, key=lambda model: model[1]["parameters"])
    panels = []
    for title in tasks or ("loss", "bits_per_byte"):
        names, rows = [], []
        for name, result in models:
            if not tasks or title in result["tasks"]:
                names.append(f"{Path(name).name}, {format_quantity(result['parameters'])}")
                rows.append(result["tasks"][title] if tasks else result)
        lines = []
        for score, marker in zip(SCORES if tasks else [title], "osv", strict=False):
            values = [number(row[score]) for row in rows]
            errors = [row.get("stderr", {}).get(score) or 0 for row in rows]
            places = range(len(rows))
            label = score if tasks else ""
            lines.append(line(values, places, label, xerr=errors, fmt=marker, mfc="none"))
        if title == HELLASWAG:
            ends = [-0.5, len(rows) - 0.5]
            lines.append(line([0.25, 0.25], ends, "chance", color="gray", ls="--"))
        title = "loss (nats per token)" if title == "loss" else title.replace("_", " ")
        percent: dict[str, Any] = {"formats": ("{x:.0%}",)} if tasks else {}
        panels.append(panel(*lines, names=names, title=title, outside="", **percent))
    return draw([panels], target, width=9, heights=(1.5 + 0.45 * len(models),))
