"""`megatoken sweep RECIPE optim.lr=log:1e-4..3e-3 ...`: searches settings by short runs, with Optuna.

Every trial is a `megatoken train` of its own below OUT. Its validation losses are reported as they come; it is stopped
when one is worse than the median of the earlier trials at that point. OUT/journal.log holds the search: the same
command goes on after a kill, and trials that were running resume from their checkpoints.
"""

import math
import re
import shlex
import threading
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from megatoken.cli import Result
from megatoken.cli.arguments import add_settings
from megatoken.cli.child_runs import find_error, find_log, stop_on_signal, train
from megatoken.cli.recipe import RECIPE_HELP
from megatoken.config.load import render, resolve
from megatoken.config.schema import FIELDS
from megatoken.console import Console
from megatoken.errors import ConfigError, DataError, ExitCode
from megatoken.redact import redact
from megatoken.system.atomic_write import local_path, read_object, replace_file, storage_errors
from megatoken.system.file_lock import lock_folder
from megatoken.system.machine import cpu_count
from megatoken.system.metrics_log import METRICS, STATUS, parse_row

JOURNAL, BEST, PICTURE, FOLDER = "journal.log", "best.yaml", "sweep.png", "trial-"
UNPRUNED_TRIALS = 4  # before any is stopped for being worse than their median
MOST_FAILURES = 3  # without one success, after which the search ends
DIGITS = 4  # of a number that is tried
RANGE = re.compile(r"(log:)?([^.]\S*?)\.\.([^.]\S*)")


@dataclass(frozen=True, slots=True)
class SearchRange:
    """What is tried for one setting: one of `choices`, or a number from low to high, in its logarithm if `log`."""

    key: str
    choices: tuple[str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False

    def suggest(self, trial: Any) -> str:
        """The value of an Optuna trial, as an override's text."""
        if self.choices:
            value = trial.suggest_categorical(self.key, self.choices)
        elif FIELDS[self.key].type is int:
            value = trial.suggest_int(self.key, int(self.low), int(self.high), log=self.log)
        else:
            value = trial.suggest_float(self.key, self.low, self.high, log=self.log)
        return self.format(value)

    def format(self, value: Any) -> str:
        """A value as an override's text; numbers are rounded."""
        return f"{value:.{DIGITS}g}" if isinstance(value, float) else str(value)


def list_combinations(ranges: Sequence[SearchRange]) -> list[dict[str, str]]:
    """Every combination of the choices, the last setting's changing fastest; none where a range is one of numbers."""
    keys = [space.key for space in ranges]
    return [
        dict(zip(keys, values, strict=True))
        for values in product(*(space.choices for space in ranges))
    ]


def parse_space(recipe: str, words: Sequence[str]) -> tuple[list[SearchRange], list[str]]:
    """The ranges among `section.field=...` words, and the fixed overrides; all are checked against the recipe.

    `a..b`: between; `log:a..b`: evenly in the logarithm; `a|b|c`: one of. Raises ConfigError.
    """
    ranges, fixed = [], []
    for word in words:
        key, _, text = word.partition("=")
        if "|" in text:
            ranges.append(SearchRange(key, tuple(text.split("|"))))
        elif match := RANGE.fullmatch(text):
            ranges.append(_parse_range(recipe, key, *match.groups()))
        else:
            fixed.append(word)
    given = [word.partition("=")[0] for word in words]
    if twice := next((key for key in given if given.count(key) > 1), ""):
        raise ConfigError(
            f"{twice} is given twice", "command line", "give one value or range for each setting"
        )
    for space in ranges:
        for end in space.choices or (f"{space.low:g}", f"{space.high:g}"):
            resolve(recipe, [*fixed, f"{space.key}={end}"])
    if not ranges:
        fix = "write section.field=log:LOW..HIGH, LOW..HIGH or A|B|C, for example optim.lr=log:1e-4..3e-3"
        raise ConfigError("nothing to search", "command line", fix)
    return ranges, fixed


def _parse_range(recipe: str, key: str, log: str | None, low: str, high: str) -> SearchRange:
    for end in (low, high):
        resolve(recipe, [f"{key}={end}"])  # its type and limits, and whether the key exists
    if FIELDS[key].type not in (int, float):
        raise ConfigError(
            f"{key} has no range: it takes {FIELDS[key].expects}",
            "command line",
            f"write {key}=A|B|C",
        )
    space = SearchRange(key, (), float(low), float(high), bool(log))
    if space.low >= space.high:
        raise ConfigError(
            f"{key}: {low} is not below {high}", "command line", f"write {key}={log or ''}LOW..HIGH"
        )
    if space.log and space.low <= 0:
        raise ConfigError(
            f"{key}: a logarithmic range begins above 0, got {low}",
            "command line",
            f"or {key}={low}..{high}",
        )
    return space


def check_data(
    recipe: str, ranges: Sequence[SearchRange], fixed: Sequence[str], console: Console
) -> None:
    """Open what the trials would train on and measure their losses with.

    Raises DataError where it is missing or damaged or has nothing held out, ConfigError where no loss is measured.
    """
    from megatoken.data.mixture import load_mixture

    paths = next((space.choices for space in ranges if space.key == "data.path"), ())
    for words in [[*fixed, f"data.path={path}"] for path in paths] or [[*fixed]]:
        config = resolve(recipe, words).config
        if not config.evaluate.tokens:
            raise ConfigError(
                "a sweep compares validation losses", "evaluate.tokens=0", "give a number of tokens"
            )
        tokenizer = config.data.tokenizer
        data = load_mixture(config.data.path, external_tokenizer=tokenizer, report=console.print)
        if not data.n_val:
            what = "no validation split, by whose loss a sweep compares"
            raise DataError(what, config.data.path, "prepare it again with --val-fraction 0.05")


class Sweep:
    """One search in its folder. Trials run in `jobs` threads, each of which waits for its training process."""

    def __init__(
        self, options: Namespace, study: Any, ranges: Sequence[SearchRange], fixed: Sequence[str]
    ) -> None:
        self.options, self.study, self.ranges, self.fixed = options, study, ranges, fixed
        self.console: Console = options.console
        self.grid = list_combinations(ranges)
        if not 0 < len(self.grid) <= options.trials:
            self.grid = []  # too many for the trials, or ranges of numbers: Optuna proposes
        self.stopping = threading.Event()
        self._asking = threading.Lock()

    def run(self) -> None:
        """Run trials until there are as many as asked: Optuna's proposals, or where they fit every combination once."""
        with ThreadPoolExecutor(self.options.jobs) as pool, stop_on_signal(self.stopping):
            for worker in [pool.submit(self._work) for _ in range(self.options.jobs)]:
                worker.result()

    def _work(self) -> None:
        try:
            while trial := self._ask():
                self._run_trial(trial)
        except BaseException:
            self.stopping.set()  # the other workers, too
            raise

    def _ask(self) -> Any:
        from optuna.trial import TrialState

        with self._asking:
            trials = list_trials(self.study)
            states = [trial.state for trial in trials]
            failures = states.count(TrialState.FAIL)
            if failures >= MOST_FAILURES and not {TrialState.COMPLETE, TrialState.PRUNED} & {
                *states
            }:
                fix = "read the .log of one, then name another --out"
                last = [
                    trial.user_attrs["folder"] for trial in trials if trial.state == TrialState.FAIL
                ][-1]
                reason = find_error(self.options.out / last).replace("error: ", ": ", 1)
                raise DataError(
                    f"the first {failures} trials failed{reason}", str(self.options.out), fix
                )
            waiting = states.count(TrialState.WAITING)
            tried = [trial.params for trial in trials]
            left = [values for values in self.grid if values not in tried]
            enough = (
                not left and not waiting
                if self.grid
                else len(states) - waiting >= self.options.trials
            )
            if self.stopping.is_set() or enough:
                return None
            if left and not waiting:
                self.study.enqueue_trial(left[0])
            index = 1 + max(
                (int(trial.user_attrs["folder"][len(FOLDER) :]) for trial in trials), default=-1
            )
            self.study.sampler = make_sampler(self.options.seed + index, self.options.jobs)
            trial = self.study.ask()
            if "folder" not in trial.user_attrs:
                trial.set_user_attr("folder", f"{FOLDER}{index:03d}")
            self._suggest(trial)  # kept with the trial before the next is asked for
            return trial

    def _suggest(self, trial: Any) -> list[str]:
        return [f"{space.key}={space.suggest(trial)}" for space in self.ranges]

    def _run_trial(self, trial: Any) -> None:
        """Train with the values of a trial and report its loss and state to Optuna."""
        from optuna.trial import TrialState

        values = self._suggest(trial)
        name = trial.user_attrs["folder"]
        folder = self.options.out / name
        threads = max(1, cpu_count() // self.options.jobs)
        losses: list[float] = []
        pruned = False

        def should_stop() -> bool:
            nonlocal pruned
            pruned = pruned or report_losses(trial, folder, losses)
            return pruned or self.stopping.is_set()

        words = [self.options.recipe, f"machine.threads={threads}", *self.fixed, *values]
        code = train(folder, [*words, "save.mirror="], should_stop)  # which has room for one run
        if self.stopping.is_set() and code != ExitCode.DONE and not pruned:
            return  # Optuna has it as running, so that the next start takes it up
        if pruned:
            state, loss = TrialState.PRUNED, None
        elif code == ExitCode.DONE and losses:
            state, loss = TrialState.COMPLETE, losses[-1]
        else:
            state, loss = TrialState.FAIL, None
        self.study.tell(trial, loss, state=state)
        shown = f"loss {losses[-1]:.4f}" if losses else f"exit {code}, see {find_log(folder)}"
        self.console.print(f"{name}  {state.name.lower():<8}  {shown}  {' '.join(values)}")


def report_losses(trial: Any, folder: Path, losses: list[float]) -> bool:
    """Tell Optuna the new validation losses of a trial and add them to `losses`: whether they call for its end now.

    Losses after that one do not count, so that what Optuna learns does not depend on when this process looks.
    """
    for loss, is_last in _read_losses(folder)[len(losses) :]:
        trial.report(loss, len(losses))
        losses.append(loss)
        if not is_last and trial.should_prune():
            return True
    return False


def _read_losses(folder: Path) -> list[tuple[float, bool]]:
    """Validation losses so far, and whether each is the last step's; one that is not finite is the largest number."""
    lines = (folder / METRICS).read_bytes().splitlines() if (folder / METRICS).exists() else []
    total = read_object(folder / STATUS).get("total_steps")
    rows = [
        row
        for line in lines
        if line.startswith(b'{"kind": "val"') and (row := parse_row(line)) and row["step"]
    ]
    return [
        (row["loss"] if isinstance(row["loss"], float) else 1e30, row["step"] == total)
        for row in rows
    ]


def make_sampler(seed: int, jobs: int) -> Any:
    """Optuna's sampler for one trial. With a seed for each, a search that was stopped goes on with the same values."""
    import optuna

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return optuna.samplers.TPESampler(seed=seed, constant_liar=jobs > 1)


def sweep(options: Namespace) -> tuple[int, dict[str, Any]]:
    """Search until `options.trials` trials have run, then write the best recipe, a table and a picture.

    Returns STOPPED when a signal ended it before. Raises ConfigError for a space that is none, another search in the
    folder, or without Optuna; DataError where there is nothing to train on or all trials fail; StorageError when
    another process searches there.
    """
    optuna = _import_optuna()
    ranges, fixed = parse_space(options.recipe, options.overrides)
    for name in ("trials", "jobs"):
        if getattr(options, name) < 1:
            raise ConfigError(
                f"--{name} is {getattr(options, name)}", f"--{name}", "give 1 or more"
            )
    check_data(options.recipe, ranges, fixed, options.console)
    out: Path = options.out or Path("sweeps") / Path(options.recipe).stem
    options.out = out
    with lock_folder(out, "sweep"):
        study = _open_study(optuna, options, ranges, fixed)
        search = Sweep(options, study, ranges, fixed)
        search.run()
        answer = _report(study, ranges, fixed, options)
    return (ExitCode.STOPPED if search.stopping.is_set() else ExitCode.DONE), answer


def _import_optuna() -> Any:
    try:
        import optuna
    except ImportError:
        fix = 'pip install "megatoken[sweep]"'
        raise ConfigError("a sweep needs optuna, which is not installed", fix=fix) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _open_study(
    optuna: Any, options: Namespace, ranges: Sequence[SearchRange], fixed: Sequence[str]
) -> Any:
    """The search of the folder, begun or gone on with: what was running when it was killed comes first."""
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    pruner = optuna.pruners.MedianPruner(n_startup_trials=UNPRUNED_TRIALS)
    try:
        storage = JournalStorage(JournalFileBackend(str(options.out / JOURNAL)))
        study = optuna.create_study(
            storage=storage, pruner=pruner, study_name="sweep", load_if_exists=True
        )
    except (ValueError, KeyError) as error:
        raise DataError(
            f"damaged: {error}", str(options.out / JOURNAL), "delete it, or name another --out"
        ) from None
    search = {
        "recipe": options.recipe,
        "ranges": [repr(space) for space in ranges],
        "fixed": list(fixed),
    }
    if study.user_attrs.get("search", search) != search:
        what = "the sweep in this folder has another recipe, other ranges or other fixed settings"
        raise ConfigError(what, str(options.out), "give the same, or name another --out")
    study.set_user_attr("search", search)
    for trial in study.get_trials(states=(optuna.trial.TrialState.RUNNING,)):
        if "folder" in trial.user_attrs:
            study.enqueue_trial(trial.params, user_attrs=trial.user_attrs)
        study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
    return study


def list_trials(study: Any) -> list[Any]:
    """The trials in order; of one that was taken up again only the last, which has the same folder."""
    trials = [trial for trial in study.get_trials(deepcopy=False) if "folder" in trial.user_attrs]
    return list({trial.user_attrs["folder"]: trial for trial in trials}.values())


def _report(
    study: Any, ranges: Sequence[SearchRange], fixed: Sequence[str], options: Namespace
) -> dict[str, Any]:
    """Print the trials, best first; write the best recipe and the picture."""
    from megatoken.bench.report import save_picture, show_rows

    console: Console = options.console
    rows = []
    for trial in list_trials(study):
        losses = [*trial.intermediate_values.values()]
        values = {
            space.key: space.format(trial.params[space.key])
            for space in ranges
            if space.key in trial.params
        }
        row = {
            "trial": trial.user_attrs.get("folder"),
            "state": trial.state.name.lower(),
            "values": values,
        }
        rows.append(
            row | {"loss": trial.value if trial.value is not None else (losses or [None])[-1]}
        )
    rows.sort(key=lambda row: (row["state"] != "complete", row["loss"] or math.inf))
    answer: dict[str, Any] = {"trials": rows, "best": None}
    if rows and rows[0]["state"] == "complete":
        answer["best"] = rows[0]
        resolved = resolve(
            options.recipe, [*fixed, *(f"{key}={text}" for key, text in rows[0]["values"].items())]
        )
        with storage_errors(options.out):
            replace_file(options.out / BEST, redact(render(resolved.config, resolved.origins)))
    heads = {name: name for name in ("trial", "state", "loss", *(space.key for space in ranges))}
    shown = [{**row, **row["values"], "loss": row["loss"] and f"{row['loss']:.4f}"} for row in rows]
    console.print()
    show_rows(heads, shown, console)
    if answer["best"]:
        answer["recipe"] = str(options.out / BEST)
        save_picture(
            lambda pyplot, path: draw_sweep(pyplot, path, rows, ranges),
            options.out / PICTURE,
            console,
        )
        console.print(
            f"best     {answer['recipe']}: megatoken train {shlex.quote(answer['recipe'])} --out runs/best"
        )
    return answer


def draw_sweep(
    pyplot: Any, path: Path, rows: Sequence[dict[str, Any]], ranges: Sequence[SearchRange]
) -> Path:
    """Loss over each setting: finished trials, stopped ones with their last loss, the best."""
    from megatoken.plots import save_figure

    figure, grid = pyplot.subplots(
        1, len(ranges), figsize=(5.5 * len(ranges), 4), layout="constrained", squeeze=False
    )
    styles = {
        "complete": ("o", "C0", "finished"),
        "pruned": ("x", "0.6", "stopped early, last loss"),
    }
    for axis, space in zip(grid[0], ranges, strict=True):
        place = space.choices.index if space.choices else float
        for state, (marker, colour, label) in styles.items():
            same = [row for row in rows if row["state"] == state and row["loss"]]
            x = [place(row["values"][space.key]) for row in same]
            axis.scatter(x, [row["loss"] for row in same], marker=marker, color=colour, label=label)
        best = place(rows[0]["values"][space.key]), rows[0]["loss"]
        axis.scatter(*best, s=140, marker="*", color="C3", label="best")
        axis.set(
            title=space.key,
            xscale="log" if space.log else "linear",
            ylabel="validation loss (nats per token)",
        )
        if space.choices:
            axis.set_xticks(range(len(space.choices)), space.choices)
        axis.grid(alpha=0.25)
    grid[0, 0].legend()
    return save_figure(pyplot, figure, path)


HELP = "search settings by short runs"
EXAMPLE = "megatoken sweep quickstart optim.lr=log:1e-4..1e-2 --trials 12"


def add_arguments(parser: ArgumentParser) -> None:
    arg = parser.add_argument
    arg("recipe", metavar="RECIPE", help=RECIPE_HELP)
    add_settings(parser)
    doc = "total runs; a larger number continues a finished sweep (default 20)"
    arg("--trials", type=int, default=20, help=doc)
    arg("--jobs", type=int, default=1, help="parallel runs, which share the CPU (default 1)")
    arg("--seed", type=int, default=0, help="seed of the search (default 0)")
    doc = "folder of the search and its runs (default sweeps/RECIPE)"
    arg("--out", type=local_path, metavar="DIR", help=doc)
    parser.epilog = f"{parser.epilog}\n\nranges: KEY=A..B, KEY=log:A..B, or KEY=A|B|C"


def run(options: Namespace, console: Console) -> Result:
    options.console = console
    return Result(*sweep(options))
