"""`megatoken sweep RECIPE optim.lr=log:1e-4..3e-3 ...`: searches settings by short runs, with Optuna.

Every trial is a `megatoken train` of its own below OUT. Its validation losses are reported as they come; it is stopped
when one is worse than the median of the earlier trials at that point. OUT/journal.log holds the search: the same
command goes on after a kill, and trials that were running resume from their checkpoints.
"""

import math
import re
import signal
import subprocess
import threading
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from megatoken.bench.report import save_picture, show_rows
from megatoken.config.load import render, resolve
from megatoken.config.schema import FIELDS
from megatoken.console import Console
from megatoken.errors import ConfigError, DataError, ExitCode, StorageError
from megatoken.launch.local import COMMAND, at_parent_death
from megatoken.plots import save_figure
from megatoken.redact import redact
from megatoken.system.atomic_write import replace_file, storage_errors
from megatoken.system.environment import cpu_count
from megatoken.train.metrics_log import read_metrics

JOURNAL, BEST, PICTURE = "journal.log", "best.yaml", "sweep.png"
POLL_SECONDS = 0.5
UNPRUNED_TRIALS = 4  # before any is stopped for being worse than their median
MOST_FAILURES = 3  # without one success, after which the search ends
DIGITS = 4  # of a number that is tried
RANGE = re.compile(r"(log:)?([^.]\S*?)\.\.(\S+)")


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
        raise ConfigError(f"{key} has no range: it takes {FIELDS[key].expects}", "command line", f"write {key}=A|B|C")
    space = SearchRange(key, (), float(low), float(high), bool(log))
    if space.low >= space.high:
        raise ConfigError(f"{key}: {low} is not below {high}", "command line", f"write {key}={log or ''}LOW..HIGH")
    if space.log and space.low <= 0:
        raise ConfigError(
            f"{key}: a logarithmic range begins above 0, got {low}", "command line", f"or {key}={low}..{high}"
        )
    return space


class Sweep:
    """One search in its folder. Trials run in `jobs` threads, each of which waits for its training process."""

    def __init__(self, options: Namespace, study: Any, ranges: Sequence[SearchRange], fixed: Sequence[str]) -> None:
        self.options, self.study, self.ranges, self.fixed = options, study, ranges, fixed
        self.console: Console = options.console
        self.stopping = threading.Event()
        self._asking = threading.Lock()

    def run(self) -> None:
        """Run trials until there are as many as asked, in the order in which Optuna proposes them."""
        with ThreadPoolExecutor(self.options.jobs) as pool, _stop_on_signal(self.stopping):
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
            states = [trial.state for trial in list_trials(self.study)]
            failures = states.count(TrialState.FAIL)
            if failures >= MOST_FAILURES and not {TrialState.COMPLETE, TrialState.PRUNED} & {*states}:
                fix = "read the .log of one, then name another --out"
                raise DataError(f"the first {failures} trials failed", str(self.options.out), fix)
            if self.stopping.is_set() or len(states) - states.count(TrialState.WAITING) >= self.options.trials:
                return None
            trial = self.study.ask()
            if "folder" not in trial.user_attrs:
                trial.set_user_attr("folder", f"trial-{trial.number:03d}")
            return trial

    def _run_trial(self, trial: Any) -> None:
        """Train with the values of a trial and report its loss and state to Optuna."""
        from optuna.trial import TrialState

        values = [f"{space.key}={space.suggest(trial)}" for space in self.ranges]
        name = trial.user_attrs["folder"]
        folder = self.options.out / name
        threads = max(1, cpu_count() // self.options.jobs)
        words = ["train", self.options.recipe, "--out", str(folder), f"machine.threads={threads}", *self.fixed, *values]
        with storage_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            output = (folder.parent / f"{name}.log").open("ab")
        # Trials end with this process, or the next start would meet them in their folders.
        end = at_parent_death(signal.SIGTERM)
        with output, subprocess.Popen([*COMMAND, *words], stdout=output, stderr=output, preexec_fn=end) as process:
            losses, pruned = self._watch(trial, process, folder)
        if self.stopping.is_set() and process.returncode == ExitCode.STOPPED:
            return  # Optuna has it as running, so that the next start takes it up
        if pruned:
            state, loss = TrialState.PRUNED, None
        elif process.returncode == ExitCode.DONE and losses:
            state, loss = TrialState.COMPLETE, losses[-1]
        else:
            state, loss = TrialState.FAIL, None
        self.study.tell(trial, loss, state=state)
        shown = f"loss {losses[-1]:.4f}" if losses else f"exit {process.returncode}, see {folder}.log"
        self.console.print(f"{name}  {state.name.lower():<8}  {shown}  {' '.join(values)}")

    def _watch(self, trial: Any, process: subprocess.Popen[bytes], folder: Path) -> tuple[list[float], bool]:
        """The validation losses of a trial, and whether it was stopped because of them."""
        losses: list[float] = []
        pruned = asked = False
        while True:
            with suppress(subprocess.TimeoutExpired):
                process.wait(POLL_SECONDS)
            ended = process.returncode is not None
            for loss in _read_losses(folder)[len(losses) :]:
                trial.report(loss, len(losses))
                losses.append(loss)
            if ended:
                return losses, pruned and process.returncode == ExitCode.STOPPED
            if not asked and (self.stopping.is_set() or (pruned := bool(losses) and trial.should_prune())):
                asked = True  # a second SIGTERM would end it before it has saved
                process.terminate()


def _read_losses(folder: Path) -> list[float]:
    """Validation losses so far; one that is not finite counts as the largest number."""
    try:
        rows = read_metrics(folder)
    except DataError:  # not begun, or a row that is being written
        return []
    losses = [row["loss"] for row in rows if row["kind"] == "val" and row["step"] > 0]
    return [loss if math.isfinite(loss) else 1e30 for loss in losses]


def sweep(options: Namespace) -> tuple[int, dict[str, Any]]:
    """Search until `options.trials` trials have run, then write the best recipe, a table and a picture.

    Returns STOPPED when a signal ended it before. Raises ConfigError for a space that is none, another search in the
    folder, or without Optuna; StorageError when another process searches there; DataError when all trials fail.
    """
    optuna = _import_optuna()
    ranges, fixed = parse_space(options.recipe, options.overrides)
    for name in ("trials", "jobs"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name} is {getattr(options, name)}", f"--{name}", "give 1 or more")
    out: Path = options.out or Path("sweeps") / Path(options.recipe).stem
    options.out = out
    with storage_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(out / ".lock", timeout=0):
            study = _open_study(optuna, options, ranges, fixed)
            search = Sweep(options, study, ranges, fixed)
            search.run()
            answer = _report(study, ranges, fixed, options)
    except Timeout:
        raise StorageError(
            "another sweep is using this folder", str(out), "wait for it, or name another --out"
        ) from None
    return (ExitCode.STOPPED if search.stopping.is_set() else ExitCode.DONE), answer


def _import_optuna() -> Any:
    try:
        import optuna
    except ImportError:
        fix = 'pip install "megatoken[sweep]"'
        raise ConfigError("a sweep needs optuna, which is not installed", fix=fix) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _open_study(optuna: Any, options: Namespace, ranges: Sequence[SearchRange], fixed: Sequence[str]) -> Any:
    """The search of the folder, begun or gone on with: what was running when it was killed comes first."""
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    pruner = optuna.pruners.MedianPruner(n_startup_trials=UNPRUNED_TRIALS)
    storage = JournalStorage(JournalFileBackend(str(options.out / JOURNAL)))
    study = optuna.create_study(storage=storage, pruner=pruner, study_name="sweep", load_if_exists=True)
    # With the number of trials: a search that goes on does not draw its first values again.
    seed = options.seed + len(study.get_trials(deepcopy=False))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study.sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=options.jobs > 1)
    search = {"recipe": options.recipe, "ranges": [repr(space) for space in ranges], "fixed": list(fixed)}
    if (before := study.user_attrs.get("search", search)) != search:
        changed = ", ".join(name for name in search if before[name] != search[name])
        fix = "give the same, or name another --out"
        raise ConfigError(f"the sweep in this folder has another {changed}", str(options.out), fix)
    study.set_user_attr("search", search)
    for trial in study.get_trials(states=(optuna.trial.TrialState.RUNNING,)):
        study.enqueue_trial(trial.params, user_attrs=trial.user_attrs)
        study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
    return study


def list_trials(study: Any) -> list[Any]:
    """The trials in order; of one that was taken up again only the last, which has the same folder."""
    trials = study.get_trials(deepcopy=False)
    return list({trial.user_attrs.get("folder", trial.number): trial for trial in trials}.values())


def _report(study: Any, ranges: Sequence[SearchRange], fixed: Sequence[str], options: Namespace) -> dict[str, Any]:
    """Print the trials, best first; write the best recipe and the picture."""
    console: Console = options.console
    rows = []
    for trial in list_trials(study):
        losses = [*trial.intermediate_values.values()]
        values = {space.key: space.format(trial.params[space.key]) for space in ranges if space.key in trial.params}
        row = {"trial": trial.user_attrs.get("folder"), "state": trial.state.name.lower(), "values": values}
        rows.append(row | {"loss": trial.value if trial.value is not None else (losses or [None])[-1]})
    rows.sort(key=lambda row: (row["state"] != "complete", row["loss"] or math.inf))
    answer: dict[str, Any] = {"trials": rows, "best": None}
    if rows and rows[0]["state"] == "complete":
        answer["best"] = rows[0]
        resolved = resolve(options.recipe, [*fixed, *(f"{key}={text}" for key, text in rows[0]["values"].items())])
        with storage_errors(options.out):
            replace_file(options.out / BEST, redact(render(resolved.config, resolved.origins)))
    heads = {name: name for name in ("trial", "state", "loss", *(space.key for space in ranges))}
    shown = [{**row, **row["values"], "loss": row["loss"] and f"{row['loss']:.4f}"} for row in rows]
    console.print()
    show_rows(heads, shown, console)
    if answer["best"]:
        answer["recipe"] = str(options.out / BEST)
        save_picture(lambda pyplot, path: draw_sweep(pyplot, path, rows, ranges), options.out / PICTURE, console)
        console.print(f"best     {answer['recipe']}: megatoken train {answer['recipe']} --out runs/best")
    return answer


def draw_sweep(pyplot: Any, path: Path, rows: Sequence[dict[str, Any]], ranges: Sequence[SearchRange]) -> Path:
    """Loss over each setting: finished trials, stopped ones with their last loss, the best."""
    figure, grid = pyplot.subplots(1, len(ranges), figsize=(5.5 * len(ranges), 4), layout="constrained", squeeze=False)
    styles = {"complete": ("o", "C0", "finished"), "pruned": ("x", "0.6", "stopped early, last loss")}
    for axis, space in zip(grid[0], ranges, strict=True):
        for state, (marker, colour, label) in styles.items():
            same = [row for row in rows if row["state"] == state and row["loss"]]
            x = [row["values"][space.key] if space.choices else float(row["values"][space.key]) for row in same]
            axis.scatter(x, [row["loss"] for row in same], marker=marker, color=colour, label=label)
        best = rows[0]["values"][space.key]
        axis.scatter(
            [best if space.choices else float(best)], [rows[0]["loss"]], s=140, marker="*", color="C3", label="best"
        )
        axis.set(title=space.key, xscale="log" if space.log else "linear", ylabel="validation loss (nats per token)")
        axis.grid(alpha=0.25)
    grid[0, 0].legend()
    return save_figure(pyplot, figure, path)


@contextmanager
def _stop_on_signal(stopping: threading.Event) -> Iterator[None]:
    """SIGTERM and SIGINT stop all trials, which save."""
    before = {number: signal.signal(number, lambda *_: stopping.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
