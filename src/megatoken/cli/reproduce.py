"""`megatoken reproduce NAME`: replay a published run, and compare its losses or scores.

A run trains GPT-2 124M on tiny Shakespeare in the published order of windows; the initial weights
and the rounding differ, so its tolerance is a few times the spread over seeds. A model's scores
must agree to the digits that were published.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from megatoken.cli import Result
from megatoken.cli.arguments import add_settings
from megatoken.config.load import ResolvedConfig, resolve
from megatoken.config.schema import MachineConfig
from megatoken.console import Console, format_duration, format_quantity
from megatoken.errors import ConfigError, ExitCode
from megatoken.model.flops import flops_per_token
from megatoken.published import MODELS, RUNS, SCORES, SOURCES, PublishedRun
from megatoken.suggest import suggest
from megatoken.system.atomic_write import local_path

HELP = "replay a published run, and compare its losses"
EXAMPLE = "megatoken reproduce notebook-fifty --plot overlay.png"
RECIPE = "shakespeare"
FIXED = (
    "data.tokenizer=gpt2",
    "log.every=1steps",
    "log.plots=false",
    "save.every=0",
    "evaluate.every=0",
    "sample.every=0",
)
COPIES = 2  # of the text, so that the longest batch fits: 524,288 of 338,025 tokens
SCORE_TOLERANCE = 0.002  # a sixth of the standard error is the rounding of bf16


def add_arguments(parser: ArgumentParser) -> None:
    arg = parser.add_argument
    doc = f"what to replay: {', '.join((*RUNS, *MODELS))}"
    arg("name", metavar="NAME", nargs="?", help=doc)
    add_settings(parser)
    arg("--list", action="store_true", help="list the published runs and what each needs")
    doc = "tiny Shakespeare (default: download it), or the examples of HellaSwag (default: the hub)"
    arg("--data", type=local_path, metavar="FILE", help=doc)
    arg("--out", type=local_path, metavar="DIR", help="run folder (default runs/reproduce/NAME)")
    arg("--plot", type=local_path, metavar="FILE", help="PNG of both loss curves")


def run(options: Namespace, console: Console) -> Result:
    if options.list or options.name is None:
        return list_runs(console)
    if options.name in MODELS:
        return compare_scores(options, console)
    if options.name not in RUNS:
        near = suggest(options.name, (*RUNS, *MODELS))
        fix = f"did you mean {near}?" if near else "see `megatoken reproduce --list`"
        raise ConfigError(f"no published run '{options.name}'", "megatoken reproduce", fix)
    return compare_losses(RUNS[options.name], options, console)


def list_runs(console: Console) -> Result:
    """Print what can be replayed."""
    rows = [["name", "what", "published", "work", "needs"]]
    for run in RUNS.values():
        config = resolve_run(run, []).config
        tokens = len(run.losses) * config.budget.batch_tokens
        work = tokens * flops_per_token(config.model.resolve(0), causal=False)
        last = f"{run.hardware}, {run.precision}: {run.losses[0]:.2f} to {run.losses[-1]:.2f}"
        rows.append([run.name, run.title, last, format_quantity(work, "FLOP"), run.needs])
    for name, model in MODELS.items():
        rows.append([name, f"{model.name} on HellaSwag", "", "", f"{model.weights} from the hub"])
    console.table(rows, left=5)
    return Result(ExitCode.DONE, {"runs": [*RUNS], "models": [*MODELS]})


def resolve_run(run: PublishedRun, overrides: Sequence[str]) -> ResolvedConfig:
    """Return the config that replays a run."""
    steps = f"budget.steps={len(run.losses)}"
    return resolve(RECIPE, [*FIXED, steps, *run.settings, *overrides])


def compare_losses(published: PublishedRun, options: Namespace, console: Console) -> Result:
    """Train the run, and compare its losses to the published ones."""
    from megatoken.system.metrics_log import read_metrics
    from megatoken.train.train import Trainer

    out = options.out or Path("runs/reproduce") / published.name
    data = write_text(out.with_name(f"{out.name}-data"), options.data, published)
    resolved = resolve_run(published, [f"data.path={data}", *options.overrides])
    summary = Trainer(resolved, out, console=console).fit()
    if summary.code:
        return Result(summary.code, None)
    rows = [row for row in read_metrics(out, console.warn) if row["kind"] == "train"]
    losses = [row["loss"] for row in rows]
    differences = [ours - theirs for ours, theirs in zip(losses, published.losses, strict=False)]
    worst = max(range(len(differences)), key=lambda step: abs(differences[step]))
    mean = sum(map(abs, differences)) / len(differences)
    agrees = abs(differences[worst]) <= published.tolerance
    seconds = median(resolved.config.budget.batch_tokens / row["tokens_per_second"] for row in rows)
    theirs = (
        f", published {published.step_milliseconds:,.0f}" if published.step_milliseconds else ""
    )
    table = [
        ("published", f"{SOURCES[published.source]} ({published.hardware}, {published.precision})"),
        ("losses", f"{losses[0]:.4f} to {losses[-1]:.4f} in {format_duration(summary.seconds)}"),
        ("theirs", f"{published.losses[0]:.4f} to {published.losses[len(losses) - 1]:.4f}"),
        ("difference", f"mean {mean:.3f}, largest {differences[worst]:+.3f} at step {worst + 1}"),
        ("tolerance", f"{published.tolerance:g}: {'reproduced' if agrees else 'not reproduced'}"),
        ("step", f"{1000 * seconds:,.0f} ms{theirs}"),
        *([("note", published.note)] if published.note else []),
    ]
    answer: dict[str, Any] = {
        "name": published.name,
        "losses": losses,
        "published": published.losses[: len(losses)],
        "largest_difference": differences[worst],
        "mean_difference": mean,
        "tolerance": published.tolerance,
        "reproduced": agrees,
        "seconds": summary.seconds,
        "step_seconds": seconds,
    }
    if options.plot:
        answer["picture"] = str(draw_overlay(published, losses, options.plot))
        table.append(("picture", answer["picture"]))
    console.table(table)
    return Result(ExitCode.DONE if agrees else ExitCode.NUMERICS, answer)


def write_text(folder: Path, text_file: Path | None, run: PublishedRun) -> Path:
    """Write tiny Shakespeare's tokens as one shard, and return its folder."""
    import numpy as np

    from megatoken.data.sources import find_source
    from megatoken.data.tokenizer import load_tokenizer

    source = find_source(str(text_file or "tinyshakespeare"))
    with source.open(source.files[0]) as file:
        text = file.read().decode()
    tokenizer = load_tokenizer("gpt2")
    documents = [text]
    if run.has_documents:
        documents = text.split("\n\n")
        documents = [f"{document}\n\n" for document in documents[:-1]] + documents[-1:]
    starts = [tokenizer.eot] if run.has_documents else []
    ids = [np.concatenate([starts, tokenizer.encode(text)]) for text in documents]
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "train_0.npy", np.concatenate(COPIES * ids).astype(np.uint16))
    return folder


def draw_overlay(run: PublishedRun, losses: Sequence[float], target: Path) -> Path:
    """Draw our losses over the published ones, and return the path of the picture."""
    from megatoken.plots import load_pyplot, open_panels, save_figure

    pyplot = load_pyplot()
    figure, (axis,) = open_panels(pyplot, size=(8, 5))
    label = f"published ({run.hardware}, {run.precision}): {run.losses[-1]:.4f}"
    steps = range(1, len(run.losses) + 1)
    axis.plot(steps, run.losses, color="0.7", lw=5, solid_capstyle="round", label=label)
    axis.plot(steps[: len(losses)], losses, color="C0", label=f"megatoken: {losses[-1]:.4f}")
    axis.set(xlabel="step", ylabel="training loss (nats per token)", title=run.title)
    axis.legend()
    return save_figure(pyplot, figure, target)


def compare_scores(options: Namespace, console: Console) -> Result:
    """Score OpenAI's weights on HellaSwag, and compare with the published scores of the model."""
    from megatoken.convert.load_pretrained import load_pretrained
    from megatoken.eval.evaluate import evaluate
    from megatoken.system.device import open_device

    model = MODELS[options.name]
    loaded = load_pretrained(model.weights, console.warn)
    device = open_device(MachineConfig(precision="fp32"))
    gpt = loaded.model.to(device.torch_device)
    answer = evaluate(gpt, loaded.tokenizer, tasks="hellaswag", data=options.data)
    scores = answer["tasks"]["hellaswag"]
    rows = [["score", "ours", "published", "by"]]
    largest = 0.0
    for published in SCORES:
        for kind in ("acc", "acc_norm", "acc_token_mean"):
            value = getattr(published, kind)
            if published.model == model.name and value is not None:
                largest = max(largest, abs(scores[kind] - value))
                cells = [f"{scores[kind]:.2%}", f"{value:.2%}"]
                rows.append([kind, *cells, SOURCES[published.source]])
    console.table(rows)
    agrees = largest <= SCORE_TOLERANCE
    data = {"name": options.name, "scores": scores, "largest_difference": largest}
    code = ExitCode.DONE if agrees else ExitCode.NUMERICS
    return Result(code, {**data, "tolerance": SCORE_TOLERANCE, "reproduced": agrees})
