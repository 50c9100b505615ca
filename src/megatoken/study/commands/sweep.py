"""`megatoken sweep RECIPE optim.lr=log:1e-4..3e-3 ...`: search settings with short runs and Optuna.

Each trial is a `megatoken train` in a folder below OUT. A trial is stopped early if its validation
loss is worse than the median of earlier trials at the same step. OUT/journal.log records the
search: repeating the command continues it, and unfinished trials resume from their checkpoints.
"""

import re
import shlex
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from megatoken.base.config.load import render, resolve
from megatoken.base.config.schema import FIELDS
from megatoken.base.console import Console
from megatoken.base.errors import ConfigError, DataError, ExitCode, import_extra
from megatoken.base.pictures import Draw, draw, line, panel
from megatoken.base.redact import redact
from megatoken.base.system.atomic_write import replace_file, storage_errors
from megatoken.base.system.file_lock import lock_folder
from megatoken.base.system.machine import cpu_count
from megatoken.base.system.metrics_log import METRICS, START, read_new_rows
from megatoken.cli import Result
from megatoken.cli.arguments import add_options
from megatoken.cli.recipe import RECIPE_HELP
from megatoken.study.experiment import Run, train_all

HELP = "search hyperparameters with short runs"
EXAMPLE = "megatoken sweep quickstart optim.lr=log:1e-4..1e-2 --trials 12"
JOURNAL = "journal.log"
BEST = "best.yaml"
PICTURE = "sweep.png"
UNPRUNED_TRIALS = 4  # trials before any is stopped early
DIVERGED = 1e30  # in place of a loss that is not finite
RANGE = re.compile(r"(log:)?([^.]\S*?)\.\.([^.]\S*)")
Space = dict[str, Any]  # an Optuna distribution by setting


def add_arguments(parser: ArgumentParser) -> None:
    add_options(parser, __file__, recipes=RECIPE_HELP)
    parser.epilog = f"{parser.epilog}\n\nranges: KEY=A..B, KEY=log:A..B, or KEY=A|B|C"


def run(options: Namespace, console: Console) -> Result:
    """Run `options.trials` trials, or all combinations of choices if these are fewer."""
    optuna = import_extra("optuna", "sweep")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space, settings = parse_space(options.recipe, options.overrides)
    check_data(options.recipe, space, settings)
    options.out = options.out or Path("sweeps") / Path(options.recipe).stem
    with lock_folder(options.out, "sweep"), warnings.catch_warnings(action="ignore"):
        search = Sweep(options, space, settings, console)
        is_stopped = train_all(iter(search.ask, None), options.jobs)
        data = report(search)
    return Result(ExitCode.STOPPED if is_stopped else ExitCode.DONE, data)


def parse_space(recipe: str, overrides: Sequence[str]) -> tuple[Space, list[str]]:
    """Split settings into those to search and those that are fixed.

    Returns the distributions of the former, and a list of the latter. Raises ConfigError.
    """
    ranges = {}
    settings = []
    for override in overrides:
        key, _, text = override.partition("=")
        is_number = key in FIELDS and FIELDS[key].type in (int, float)
        if "|" in text or (is_number and RANGE.fullmatch(text)):
            ranges[key] = text
        else:
            settings.append(override)
    if not ranges:
        fix = "give KEY=LOW..HIGH, KEY=log:LOW..HIGH or KEY=A|B|C"
        raise ConfigError("nothing to search", "command line", fix)
    return {key: parse_range(recipe, settings, key, text) for key, text in ranges.items()}, settings


def parse_range(recipe: str, settings: Sequence[str], key: str, text: str) -> Any:
    """Parse `low..high`, `log:low..high` or `a|b|c` as the distribution of the setting `key`.

    Raises ConfigError.
    """
    from optuna import distributions

    match = RANGE.fullmatch(text)
    values = [match[2], match[3]] if match else text.split("|")
    for value in values:
        resolve(recipe, [*settings, f"{key}={value}"])
    if match is None:
        return distributions.CategoricalDistribution(values)
    low, high = map(float, values)
    try:
        if FIELDS[key].type is int:
            return distributions.IntDistribution(int(low), int(high), log=bool(match[1]))
        return distributions.FloatDistribution(low, high, log=bool(match[1]))
    except ValueError as error:
        raise ConfigError(str(error), f"{key}={text}") from None


def check_data(recipe: str, space: Space, settings: Sequence[str]) -> None:
    """Raise ConfigError or DataError unless all datasets can be opened and have held-out text."""
    from megatoken.data.mixture import load_mixture

    config = resolve(recipe, settings).config.data
    paths = space["data.path"].choices if "data.path" in space else [config.path]
    for path in paths:
        if not load_mixture(path, external_tokenizer=config.tokenizer, cache=config.cache).n_val:
            raise DataError("no held-out text", path, "prepare it again with --val-fraction 0.05")


def format_values(params: dict[str, Any]) -> dict[str, str]:
    """Format the values of a trial as they are written in settings, numbers with 4 digits."""
    return {
        key: f"{value:.4g}" if isinstance(value, float) else str(value)
        for key, value in params.items()
    }


class Sweep:
    """A search in the folder `options.out`, new or continued.

    Raises ConfigError if the folder holds another search.
    """

    def __init__(
        self, options: Namespace, space: Space, settings: Sequence[str], console: Console
    ) -> None:
        import optuna
        from optuna.storages.journal import JournalFileBackend

        self.options = options
        self.space = space
        self.settings = settings
        self.console = console
        journal = JournalFileBackend(str(options.out / JOURNAL))
        self.study = optuna.create_study(
            storage=optuna.storages.JournalStorage(journal),
            pruner=optuna.pruners.MedianPruner(n_startup_trials=UNPRUNED_TRIALS),
            study_name="sweep",
            load_if_exists=True,
        )
        search = [options.recipe, *options.overrides]
        if self.study.user_attrs.get("search", search) != search:
            raise ConfigError("another sweep is in this folder", options.out, "name another --out")
        self.study.set_user_attr("search", search)
        self._interrupted_trials = self.study.get_trials(states=[optuna.trial.TrialState.RUNNING])
        self._n_trials = options.trials
        combinations = list(product(*(getattr(values, "choices", ()) for values in space.values())))
        if 0 < len(combinations) <= options.trials:  # all are choices
            for values in combinations:
                params = dict(zip(space, values, strict=True))
                self.study.enqueue_trial(params, skip_if_exists=True)
            self._n_trials = len(self.study.trials)

    def ask(self) -> "Trial | None":
        """Return the next trial with its values, or None at the end; interrupted trials come first.

        The values are drawn with a seed per trial, so that a continued search draws the same ones.
        """
        import optuna

        trials = self.study.get_trials(deepcopy=False)
        n_started = sum(trial.state != optuna.trial.TrialState.WAITING for trial in trials)
        number = self._interrupted_trials[0].number if self._interrupted_trials else len(trials)
        self.study.sampler = optuna.samplers.TPESampler(
            seed=self.options.seed + number, constant_liar=self.options.jobs > 1
        )
        if self._interrupted_trials:
            trial = optuna.Trial(self.study, self._interrupted_trials.pop(0)._trial_id)
        elif n_started < self._n_trials:
            trial = self.study.ask()
        else:
            return None
        for key, distribution in self.space.items():
            trial._suggest(key, distribution)
        return Trial(self, trial)


class Trial(Run):
    """A run of a sweep, whose validation losses are reported to Optuna as it logs them."""

    def __init__(self, search: Sweep, trial: Any) -> None:
        threads = max(1, cpu_count() // search.options.jobs)
        self.values = [f"{key}={text}" for key, text in format_values(trial.params).items()]
        arguments = [search.options.recipe, f"machine.threads={threads}", *search.settings]
        arguments += [*self.values, "save.mirror="]  # a mirror has room for one run
        super().__init__(find_folder(search.options.out, trial), arguments)
        self.trial = trial
        self.losses: list[float] = []
        self.is_pruned = False
        self._search = search
        self._position = START
        self._step = 0

    def is_hopeless(self) -> bool:
        """Report new losses; return whether the trial must be stopped early.

        From then on, losses are ignored, so that the search does not depend on how often the log is
        read.
        """
        if not (self.folder / METRICS).exists():
            return False
        rows, self._position = read_new_rows(self.folder, self._position)
        total_steps = self.status.get("total_steps")
        for row in rows:
            if row["kind"] == "val" and row["step"] > self._step and not self.is_pruned:
                self._step = row["step"]
                loss = row["loss"] if isinstance(row["loss"], float) else DIVERGED
                self.trial.report(loss, len(self.losses))
                self.losses.append(loss)
                self.is_pruned = self._step != total_steps and self.trial.should_prune()
        return self.is_pruned

    def end(self, code: int, *, is_stopping: bool) -> None:
        """Record how the trial ended. Optuna keeps one that was told to stop, and resumes it."""
        from optuna.trial import TrialState

        if self.is_pruned:
            state = TrialState.PRUNED
        elif code == ExitCode.DONE and self.losses:
            state = TrialState.COMPLETE
        elif is_stopping:
            return
        else:
            state = TrialState.FAIL
        loss = self.losses[-1] if self.losses else None
        self._search.study.tell(self.trial, loss if state == TrialState.COMPLETE else None, state)
        result = f"exit {code}" if loss is None else f"loss {loss:.4f}"
        line = f"{self.folder.name}  {state.name.lower():<8}  {result}  {' '.join(self.values)}"
        self._search.console.print(line)


def find_folder(out: Path, trial: Any) -> Path:
    """Return the run folder of a trial."""
    return out / f"trial-{trial.number:03d}"


def report(search: Sweep) -> dict[str, Any]:
    """Print the trials, best first; write the best recipe and a picture.

    Returns what --json prints.
    """
    from megatoken.study.bench.report import save_picture

    out, console = search.options.out, search.console
    rows: list[dict[str, Any]] = [
        {
            "trial": find_folder(out, trial).name,
            "state": trial.state.name.lower(),
            "values": format_values(trial.params),
            "loss": trial.value,
        }
        for trial in search.study.get_trials(deepcopy=False)
        if trial.params
    ]
    rows.sort(key=lambda row: (row["state"] != "complete", row["loss"] is None, row["loss"]))
    cells = [("trial", "state", "loss", *search.space)]
    for row in rows:
        loss = "-" if row["loss"] is None else f"{row['loss']:.4f}"
        cells.append((row["trial"], row["state"], loss, *row["values"].values()))
    console.table(cells)
    if rows and all(row["state"] == "fail" for row in rows):
        raise DataError(f"all trials failed: {Run(out / rows[0]['trial'], []).read_error()}", out)
    if not rows or rows[0]["state"] != "complete":
        return {"trials": rows, "best": None}
    values = [f"{key}={text}" for key, text in rows[0]["values"].items()]
    resolved = resolve(search.options.recipe, [*search.settings, *values])
    recipe = str(out / BEST)
    with storage_errors(out):
        replace_file(out / BEST, redact(render(resolved.config, resolved.origins)))
    picture = partial(draw_losses, search.study, search.space)
    save_picture(picture, out / PICTURE, console)
    console.print(f"best: megatoken train {shlex.quote(recipe)} --out runs/best")
    return {"trials": rows, "best": rows[0], "recipe": recipe}


def draw_losses(study: Any, space: Space, path: Path) -> Path:
    """Plot the loss of finished, early-stopped and the best trial against each setting.

    Returns the path of the picture.
    """
    from optuna.trial import TrialState

    groups = (
        ("finished", "o", study.get_trials(states=[TrialState.COMPLETE])),
        ("stopped early", "x", study.get_trials(states=[TrialState.PRUNED])),
        ("best", "r*", [study.best_trial]),
    )
    panels: list[Draw] = []
    for key, distribution in space.items():
        lines = []
        for label, marker, trials in groups:
            x = [distribution.to_internal_repr(trial.params[key]) for trial in trials]
            y = [trial.value for trial in trials]
            lines.append(line(x, y, label if trials and not panels else "", fmt=marker))
        choices = getattr(distribution, "choices", ())  # their internal values are indices
        ticks: dict[str, Any] = (
            {"xticks": range(len(choices)), "xticklabels": choices} if choices else {}
        )
        scale = "log" if getattr(distribution, "log", False) else "linear"
        axes: dict[str, Any] = {
            "xlabel": key,
            "ylabel": "validation loss (nats per token)",
            "xscale": scale,
        }
        panels.append(panel(*lines, **axes, **ticks))
    return draw([panels], path)
