"""`megatoken reproduce NAME`: replay a published run, and compare its losses or scores.

A run trains GPT-2 124M on tiny Shakespeare in the published order of windows, from other random
weights. Each run has its own tolerance in published.toml. A model's scores must agree within
SCORE_TOLERANCE.
"""

import hashlib
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from megatoken.base.config.load import ResolvedConfig, resolve
from megatoken.base.config.schema import MachineConfig
from megatoken.base.console import Console
from megatoken.base.errors import DataError, ExitCode
from megatoken.base.published import MODELS, RUNS, SCORES, SOURCES, PublishedRun
from megatoken.base.system.metrics_log import of_kind, read_metrics
from megatoken.cli import Data, Result
from megatoken.cli.arguments import add_options
from megatoken.inference.tasks import SCORES as SCORE_NAMES

HELP = "replay a published run, and compare its losses"
EXAMPLE = "megatoken reproduce notebook-fifty --plot overlay.png"
FIXED_SETTINGS = (
    "data.tokenizer=gpt2",
    "log.every=1steps",
    "log.plots=false",
    "save.every=0",
    "evaluate.every=0",
    "sample.every=0",
)
COPIES = 2  # of the text, so that the longest batch fits: 524,288 of 338,025 tokens
SCORE_TOLERANCE = 0.002  # absolute difference of accuracies


def add_arguments(parser: ArgumentParser) -> None:
    names = (*RUNS, *MODELS)
    add_options(parser, __file__, names=names, listed=", ".join(names))


def run(options: Namespace, console: Console) -> Result | Data:
    name = options.name
    if options.list or name is None:
        return list_runs(console)
    if name in MODELS:
        return compare_scores(MODELS[name], options, console)
    return compare_losses(RUNS[name], options, console)


def list_runs(console: Console) -> Data:
    """Print the published runs and models."""
    rows = [["name", "what", "published on", "first and last loss", "needs"]]
    for run in RUNS.values():
        losses = f"{run.losses[0]:.2f} {run.losses[-1]:.2f}"
        rows.append([run.name, run.title, run.hardware, losses, run.needs])
    for name, model in MODELS.items():
        rows.append(
            [name, f"{model['name']} on HellaSwag", "", "", f"{model['weights']} from the hub"]
        )
    console.table(rows, left=5)
    return {"runs": [*RUNS, *MODELS]}


def resolve_run(run: PublishedRun, overrides: Sequence[str]) -> ResolvedConfig:
    """Return the config that replays a run."""
    steps = f"budget.steps={len(run.losses)}"
    return resolve("shakespeare", [*FIXED_SETTINGS, steps, *run.settings, *overrides])


def compare_losses(run: PublishedRun, options: Namespace, console: Console) -> Result:
    """Train a run, and compare its losses with the published ones."""
    import numpy as np

    from megatoken.train.train import Trainer

    out = options.out or Path("runs/reproduce") / run.name
    dataset = write_text(out.with_name(f"{out.name}-data"), options.data, run.has_documents)
    resolved = resolve_run(run, [f"data.path={dataset}", *options.overrides])
    summary = Trainer(resolved, out, console=console).fit()
    if summary.code:
        return Result(summary.code, None)
    logged = {row["step"]: row["loss"] for row in of_kind(read_metrics(out), "train")}
    steps = [step for step in logged if step <= len(run.losses)]
    losses = [logged[step] for step in steps]
    published = [run.losses[step - 1] for step in steps]
    differences = np.subtract(losses, published)
    worst = int(abs(differences).argmax())
    mean = float(abs(differences).mean())
    largest = float(differences[worst])
    agrees = abs(largest) <= run.tolerance
    count = f"{len(steps)} of {len(run.losses)} steps"
    table = [
        ("published", f"{published[0]:.4f} to {published[-1]:.4f}, {run.hardware}"),
        ("here", f"{losses[0]:.4f} to {losses[-1]:.4f}"),
        ("difference", f"mean {mean:.3f}, largest {largest:+.3f} at step {steps[worst]}"),
        ("tolerance", f"{run.tolerance:g}: {count} {'' if agrees else 'not '}reproduced"),
        *([("changed", " ".join(options.overrides))] if options.overrides else []),
        *([("note", run.note)] if run.note else []),
    ]
    if options.plot:
        table.append(("picture", str(draw_overlay(run, steps, losses, options.plot))))
    console.table(table)
    data = {
        "losses": losses,
        "published": published,
        "largest_difference": largest,
        "mean_difference": mean,
        "reproduced": agrees,
    }
    return Result(ExitCode.DONE if agrees else ExitCode.NUMERICS, data)


def write_text(folder: Path, file: Path | None, has_documents: bool) -> Path:
    """Write tiny Shakespeare's tokens as one shard, and return its folder.

    file: a copy of the text. has_documents: as in `PublishedRun`.
    """
    import numpy as np

    from megatoken.text.sources import SHAKESPEARE_SHA256, find_source
    from megatoken.text.tokenizer import load_tokenizer

    source = find_source(str(file or "tinyshakespeare"))
    tokenizer = load_tokenizer("gpt2")
    with source.files[0].opener(source.files[0]) as stream:
        content = stream.read()
    if hashlib.sha256(content).hexdigest() != SHAKESPEARE_SHA256:
        raise DataError("not tiny Shakespeare", str(file), "leave out --data to download it")
    text = content.decode()
    ids = [tokenizer.encode(text)]
    if has_documents:
        paragraphs = re.findall(r".+?(?:\n\n|\Z)", text, re.DOTALL)
        ids = [np.append(tokenizer.eot, tokenizer.encode(part)) for part in paragraphs]
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "train_0.npy", np.concatenate(COPIES * ids).astype(np.uint16))
    return folder


def draw_overlay(
    run: PublishedRun, steps: Sequence[int], losses: Sequence[float], target: Path
) -> Path:
    """Draw our losses over the published ones, and return the path of the picture."""
    from megatoken.base.pictures import draw, line, panel

    label = f"published ({run.hardware}, {run.precision}): {run.losses[-1]:.4f}"
    shown = panel(
        line(range(1, len(run.losses) + 1), run.losses, label, color="0.7", lw=5),
        line(steps, losses, f"megatoken: {losses[-1]:.4f}"),
        xlabel="step",
        ylabel="training loss (nats per token)",
        title=f"GPT-2 124M on tiny Shakespeare: {run.title}",
    )
    return draw([[shown]], target, width=8, heights=(5,))


def compare_scores(model: dict[str, str], options: Namespace, console: Console) -> Result:
    """Score OpenAI's weights on HellaSwag, and compare with the published scores of the model."""
    from megatoken.base.system.device import open_device
    from megatoken.inference.evaluate import evaluate
    from megatoken.text.load_pretrained import load_pretrained

    loaded = load_pretrained(model["weights"], console.warn)
    gpt = loaded.model.to(open_device(MachineConfig()).torch_device)
    result = evaluate(gpt, loaded.tokenizer, tasks="hellaswag", data=options.data)
    scores = result["tasks"]["hellaswag"]
    rows = [["score", "here", "published", "by"]]
    largest = 0.0
    for known in SCORES:
        for score in SCORE_NAMES:
            value = getattr(known, score)
            if known.model == model["name"] and value:
                largest = max(largest, abs(scores[score] - value))
                rows.append([score, f"{scores[score]:.4f}", f"{value:.4f}", SOURCES[known.source]])
    console.table(rows)
    agrees = largest <= SCORE_TOLERANCE
    data = {"scores": scores, "largest_difference": largest, "reproduced": agrees}
    return Result(ExitCode.DONE if agrees else ExitCode.NUMERICS, data)
