"""`megatoken eval`: evaluate models; prints a table, draws scores over sizes, returns the dictionary for --json."""

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatoken.config.schema import MachineConfig
from megatoken.console import Console, format_quantity
from megatoken.convert.hf.load import refuse_missing_path
from megatoken.convert.load_pretrained import LoadedModel, load_pretrained
from megatoken.data.chat_template import find_template
from megatoken.distributed.comm import Comm, join_process_group
from megatoken.distributed.env import read_dist_env
from megatoken.eval.answers import (
    DEFAULT_TOKENS,
    AnswerSettings,
    describe_answers,
    evaluate_answers,
    read_questions,
)
from megatoken.eval.evaluate import evaluate_loss, evaluate_tasks
from megatoken.eval.multiple_choice import describe_cut, format_score
from megatoken.eval.rewards import REWARDS, load_reward
from megatoken.eval.tasks import SCORES, find_tasks, read_examples
from megatoken.model.flops import count_parameters
from megatoken.plots import check_picture, load_pyplot, save_figure
from megatoken.sampling.choose import Sampling
from megatoken.system.device import Device, memory_errors, open_device

Evaluation = Callable[[Namespace, LoadedModel, Device, Comm, Console], dict[str, Any]]


@memory_errors("eval", "use --precision bf16 or --device cpu")
def evaluate_models(
    options: Namespace, run_harness: Evaluation | None = None
) -> dict[str, Any] | None:
    """Load each model and evaluate it, by lm-evaluation-harness if given. None on every rank but the first.

    The answer for one model; for several {"models": [one for each, with its `parameters`]}.
    """
    for name in options.models:
        refuse_missing_path(name)
    if options.plot:
        check_picture(options.plot)
    own_tasks = options.tasks and not run_harness
    # Examples are read and checked before a model is loaded.
    tasks = (
        read_examples(find_tasks(options.tasks), options.data, options.limit) if own_tasks else {}
    )
    dist_env = read_dist_env()
    console = Console(to_stderr=options.json, quiet=not dist_env.is_main_process)
    machine = MachineConfig(device=options.device, precision=options.precision)
    device = open_device(
        machine, local_rank=dist_env.local_rank, local_world_size=dist_env.local_world_size
    )
    answers: list[dict[str, Any]] = []
    with join_process_group(dist_env, device.type) as comm:
        for name in options.models:
            loaded = load_pretrained(name, console.warn)
            loaded.model.to(device.torch_device)
            about = {"model": loaded.source, "parameters": count_parameters(loaded.model.config)}
            if run_harness:
                answers.append(about | run_harness(options, loaded, device, comm, console))
                continue
            if tasks:
                result = evaluate_tasks(
                    loaded.model,
                    loaded.tokenizer,
                    tasks,
                    device,
                    comm,
                    token_mean=not options.no_token_mean,
                    per_example=options.examples,
                )
            else:
                result = evaluate_loss(
                    loaded.model,
                    loaded.tokenizer,
                    options.data,
                    device,
                    comm,
                    limit=options.limit,
                    split=options.split,
                )
            answers.append(about | result)
            if len(options.models) > 1:
                width = max(map(len, options.models)) + 2
                head = "" if len(answers) > 1 else f"{'model':<{width}}{'parameters':>14}  "
                print_row(head, f"{name:<{width}}{about['parameters']:>14,}  ", result, console)
            elif not options.json:
                print_tasks(result, console) if tasks else print_loss(
                    result, options.limit, console
                )
    if not dist_env.is_main_process:
        return None
    if options.plot:
        console.print(f"picture: {draw_scores(options.models, answers, options.plot)}")
    if len(answers) > 1:
        return {"models": answers}
    return {key: value for key, value in answers[0].items() if key != "parameters"}


def answer_questions(options: Namespace) -> Evaluation:
    """The evaluation of `--chat`, whose rows and numbers are checked now."""
    temperature = 1.0 if options.temperature is None else options.temperature
    new_tokens = DEFAULT_TOKENS if options.tokens is None else options.tokens
    name = options.reward or "exact"
    reward = REWARDS.get(name) or load_reward(name)
    sampling = Sampling(new_tokens, temperature)
    samples = options.samples or 0
    settings = AnswerSettings(reward, name, samples, sampling, per_example=options.examples)
    questions = read_questions(options.chat, options.limit)

    def evaluate_chat(
        options: Namespace, loaded: LoadedModel, device: Device, comm: Comm, console: Console
    ) -> dict[str, Any]:
        result = evaluate_answers(
            loaded.model,
            find_template(loaded.tokenizer),
            questions,
            settings,
            device=device,
            comm=comm,
        )
        if not options.json:
            console.table([("model", loaded.source), *describe_answers(result)])
        return {"chat": {**result, "data": options.chat}}

    return evaluate_chat


def print_row(head: str, lead: str, result: dict[str, Any], console: Console) -> None:
    """The lines of one model of several behind `lead`, below the heads of the columns if `head` begins them."""
    if "tasks" in result:
        print_tasks(result, console, head, lead)
        return
    if head:
        console.print(f"{head}{'loss':>10}{'bits per byte':>16}{'perplexity':>16}{'tokens':>16}")
    bits = "-" if result["bits_per_byte"] is None else f"{result['bits_per_byte']:.4f}"
    values = f"{result['loss']:>10.4f}{bits:>16}{result['perplexity']:>16.3f}{result['target_tokens']:>16,}"
    console.print(lead + values)


def print_tasks(
    result: dict[str, Any], console: Console, head: str | None = None, lead: str = ""
) -> None:
    """One line per task: scores in percent with their standard errors. head: of the column of `lead`; "": no heads."""
    width = max(map(len, [*result["tasks"], "task"])) + 2
    if head != "":
        console.print(
            f"{head or ''}{'task':<{width}}{'n':>7}" + "".join(f"{score:>18}" for score in SCORES)
        )
    for name, metrics in result["tasks"].items():
        scores = "".join(f"{format_score(metrics, score):>18}" for score in SCORES)
        perplexity = f"   perplexity {metrics['perplexity']:.2f}" if "perplexity" in metrics else ""
        console.print(
            f"{lead}{name:<{width}}{metrics['n']:>7,}{scores}{perplexity}{describe_cut(metrics)}"
        )


def print_loss(result: dict[str, Any], limit: int, console: Console) -> None:
    spread = "spread evenly over " if limit else ""
    over = f"{result['target_tokens']:,} tokens, {result['text_bytes']:,} bytes of text, {spread}"
    loss = f"{result['loss']:.4f} nats per token, perplexity {result['perplexity']:.3f}"
    bits = result["bits_per_byte"]
    rows = [
        ("loss", loss),
        ("bits per byte", "no token is text" if bits is None else f"{bits:.4f}"),
    ]
    console.table([*rows, ("over", f"{over}{result['split']} of {result['data']}")])


def draw_scores(names: Sequence[str], answers: Sequence[Mapping[str, Any]], target: Path) -> Path:
    """Draw over the parameters of the models a panel for each task with its scores, or the loss and bits per byte."""
    pyplot = load_pyplot()
    order = sorted(range(len(names)), key=lambda index: float(answers[index]["parameters"]))
    ordered, tasks = [answers[index] for index in order], list(answers[0].get("tasks", ()))
    panels = tasks or ["loss", "bits_per_byte"]
    columns = min(len(panels), 2)
    size = {
        "figsize": (5.5 * columns, 4.2 * -(-len(panels) // columns)),
        "layout": "constrained",
        "squeeze": False,
    }
    figure, axes = pyplot.subplots(-(-len(panels) // columns), columns, **size)
    parameters = [answer["parameters"] for answer in ordered]
    sizes = sorted({*parameters})
    for axis, panel in zip(axes.flat, panels, strict=False):
        curves = {panel: [(answer.get(panel), 0.0) for answer in ordered]}
        if tasks:
            scored = [answer["tasks"][panel] for answer in ordered]
            curves = {
                score: [(each[score], each["stderr"][score] or 0.0) for each in scored]
                for score in SCORES
            }
        for (curve, values), marker in zip(curves.items(), "osv", strict=False):
            y, errors = zip(*values, strict=True)
            if None not in y:
                axis.errorbar(parameters, y, errors, marker=marker, ms=5, lw=1, label=curve)
        for size in sizes:
            models = "\n".join(
                Path(names[i]).name for i in order if answers[i]["parameters"] == size
            )
            axis.axvline(size, color="0.9", zorder=0)
            axis.annotate(models, (size, 0), xycoords=axis.get_xaxis_transform(),
                          rotation=90, fontsize=8, xytext=(2, 4), textcoords="offset points")  # fmt: skip
        axis.set(
            title=panel.replace("_", " ") if not tasks else panel, xlabel="parameters", xscale="log"
        )
        axis.set_xticks(sizes, map(format_quantity, sizes))
        axis.minorticks_off()
        axis.margins(x=0.1, y=0.2)
        if tasks:
            axis.set_ylim(bottom=max(0.0, axis.get_ylim()[0]))
            axis.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")
            axis.legend()
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    return save_figure(pyplot, figure, target)
