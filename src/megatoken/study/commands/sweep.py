"""`megatoken sweep RECIPE optim.lr=log:1e-4..3e-3 ...`: search settings with short runs and Optuna.

Each trial is a `megatoken train` in a folder below OUT. A trial is stopped early if its validation
loss is worse than the median of other trials at the same step. OUT/journal.log records the search:
repeating the command continues it, and unfinished trials resume from their checkpoints. Several
machines that run the same command with OUT on a shared disk share the search: each trains trials
that no other one is training.
"""

import os
import re
import shlex
import socket
import threading
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import ExitStack, suppress
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
from megatoken.base.system.file_lock import LockedError, lock_folder
from megatoken.base.system.metrics_log import METRICS, START, read_new_rows
from megatoken.cli import Result
from megatoken.cli.arguments import add_options
from megatoken.cli.recipe import RECIPE_HELP
from megatoken.study.experiment import Run, Slots, train_all

HELP = "search hyperparameters with short runs"
EXAMPLE = "megatoken sweep quickstart optim.lr=log:1e-4..1e-2 --trials 12"
JOURNAL = "journal.log"
STUDY = "sweep"
LOCKS = ".locks"  # a folder per trial, which is locked by the process that trains it
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
    from megatoken.base.system.device import list_gpus

    optuna = import_extra("optuna", "sweep")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space, settings = parse_space(options.recipe, options.overrides)
    check_data(options.recipe, space, settings)
    options.out = options.out or Path("sweeps") / Path(options.recipe).stem
    machine = resolve(options.recipe, settings).config.machine
    slots = Slots(options.jobs, list_gpus(machine.device))
    with warnings.catch_warnings(action="ignore"):
        with lock_folder(options.out, "sweep", on_wait=lambda: None):  # others also open it
            search = Sweep(options, space, settings, slots.share_cores(machine), console)
        is_stopped = train_all(search.ask, slots, console)
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

    settings, machine_settings: fixed settings of the user and of this machine's trials.
    killed: numbers of trials that were killed in this process, which leaves them to the next one.
    """

    def __init__(
        self,
        options: Namespace,
        space: Space,
        settings: Sequence[str],
        machine_settings: Sequence[str],
        console: Console,
    ) -> None:
        import optuna
        from optuna.storages.journal import JournalFileBackend

        self.options = options
        self.space = space
        self.settings = settings
        self.machine_settings = machine_settings
        self.console = console
        self.killed: set[int] = set()
        journal = JournalFileBackend(str(options.out / JOURNAL))
        self.study = optuna.create_study(
            storage=optuna.storages.JournalStorage(journal),
            pruner=optuna.pruners.MedianPruner(n_startup_trials=UNPRUNED_TRIALS),
            study_name=STUDY,
            load_if_exists=True,
        )
        search = [options.recipe, *options.overrides]
        if self.study.user_attrs.get("search", search) != search:
            raise ConfigError("another sweep is in this folder", options.out, "name another --out")
        self.study.set_user_attr("search", search)
        self._n_trials = options.trials
        combinations = list(product(*(getattr(values, "choices", ()) for values in space.values())))
        if 0 < len(combinations) <= options.trials:  # all are choices
            for values in combinations:
                params = dict(zip(space, values, strict=True))
                self.study.enqueue_trial(params, skip_if_exists=True)
            self._n_trials = len(self.study.trials)
        for _ in range(len(self.study.trials), self._n_trials):
            self.study.enqueue_trial({})

    def ask(self) -> "Trial | None":
        """Return the first unfinished trial that no process is training; None if there is none."""
        for number in range(self._n_trials):
            with ExitStack() as lock, suppress(LockedError):
                if not (number in self.killed or self._get_trial(number).state.is_finished()):
                    folder = self.options.out / LOCKS / find_folder(self.options.out, number).name
                    lock.enter_context(lock_folder(folder, "sweep"))
                    if trial := self._claim(number):
                        return Trial(self, trial, lock.pop_all())
        return None

    def _get_trial(self, number: int) -> Any:
        return self.study.get_trials(deepcopy=False)[number]

    def _claim(self, number: int) -> Any:
        """Return a trial with its values; None if another process has just trained it.

        The values are drawn with a seed per trial, so that a continued search draws the same ones.
        """
        import optuna

        trial = self._get_trial(number)
        if trial.state.is_finished():
            return None
        self.study._storage.set_trial_state_values(trial._trial_id, optuna.trial.TrialState.RUNNING)
        sampler = optuna.samplers.TPESampler(seed=self.options.seed + number, constant_liar=True)
        study = optuna.load_study(  # of its own, because studies cache the trials of others
            study_name=STUDY, storage=self.study._storage, sampler=sampler, pruner=self.study.pruner
        )
        claimed = optuna.Trial(study, trial._trial_id)
        for key, distribution in self.space.items():
            claimed._suggest(key, distribution)
        worker = f"{socket.gethostname()}:{os.getpid()}"
        workers = dict.fromkeys((*claimed.user_attrs.get("workers", ()), worker))
        claimed.set_user_attr("workers", [*workers])
        return claimed


class Trial(Run):
    """A run of a sweep, whose validation losses are reported to Optuna as it logs them."""

    def __init__(self, search: Sweep, trial: Any, lock: ExitStack) -> None:
        """Open a trial. lock: is closed at the end of `train`."""
        self.values = [f"{key}={text}" for key, text in format_values(trial.params).items()]
        arguments = [search.options.recipe, *search.machine_settings, *search.settings]
        arguments += [*self.values, "save.mirror="]  # a mirror has room for one run
        folder = find_folder(search.options.out, trial.number)
        super().__init__(folder, arguments, search.console)
        self.trial = trial
        self.losses: list[float] = []
        self.is_pruned = False
        self._search = search
        self._lock = lock
        self._position = START
        self._step = 0

    def train(self, stopping: threading.Event, environment: dict[str, str]) -> None:
        with self._lock:
            super().train(stopping, environment)

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
        """Record how the trial ended. One that was stopped or killed stays to be resumed."""
        from optuna.trial import TrialState

        if self.is_pruned:
            state = TrialState.PRUNED
        elif code == ExitCode.DONE and self.losses:
            state = TrialState.COMPLETE
        elif is_stopping or code == ExitCode.STOPPED:
            return
        elif code < 0:
            self._search.killed.add(self.trial.number)
            return
        else:
            state = TrialState.FAIL
        loss = self.losses[-1] if self.losses else None
        self._search.study.tell(self.trial, loss if state == TrialState.COMPLETE else None, state)
        result = f"exit {code}" if loss is None else f"loss {loss:.4f}"
        line = f"{self.folder.name}  {state.name.lower():<8}  {result}  {' '.join(self.values)}"
        self.console.print(line)


def find_folder(out: Path, number: int) -> Path:
    """Return the run folder of a trial."""
    return out / f"trial-{number:03d}"


def report(search: Sweep) -> dict[str, Any]:
    """Print the trials, best first; write the best recipe and a picture.

    Returns what --json prints.
    """
    from megatoken.study.bench.report import save_picture

    out, console = search.options.out, search.console
    rows: list[dict[str, Any]] = [
        {
            "trial": find_folder(out, trial.number).name,
            "state": trial.state.name.lower(),
            "workers": trial.user_attrs.get("workers", []),
            "values": format_values(trial.params),
            "loss": trial.value,
        }
        for trial in search.study.get_trials(deepcopy=False)
        if trial.params
    ]
    rows.sort(key=lambda row: (row["state"] != "complete", row["loss"] is None, row["loss"]))
    cells = [("trial", "state", "loss", *search.space, "workers")]
    for row in rows:
        loss = "-" if row["loss"] is None else f"{row['loss']:.4f}"
        workers = ", ".join(row["workers"])
        cells.append((row["trial"], row["state"], loss, *row["values"].values(), workers))
    console.table(cells)
    if rows and all(row["state"] == "fail" for row in rows):
        first = Run(out / rows[0]["trial"], [], console)
        raise DataError(f"all trials failed: {first.read_error()}", out)
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
