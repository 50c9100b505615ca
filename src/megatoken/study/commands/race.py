"""`megatoken race A B ... --tokens T`: compare the tokens and time to reach a loss.

A contender is a recipe, which may have its own settings: 'quickstart optim.lr=8e-3' (in quotes).
All contenders train with the same seeds, which set the order of the data, and are validated on all
held-out text. Each run is a `megatoken train` in a folder below OUT. The runs take turns of a few
minutes, so that slow hours of the machine affect all of them; with `--jobs`, several train at once.
Repeating the command continues a race, and trains seeds or contenders that were added.

With `--minutes`, short runs of each contender first measure its pace, which sets how many tokens it
trains on. The budget is fixed from then on, so schedules end with it and runs are deterministic.
"""

import re
import shlex
import threading
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from megatoken.base.config.fields import parse_time
from megatoken.base.config.load import ALTERNATIVES, RUN_CONFIG, list_changes, resolve
from megatoken.base.config.schema import Config
from megatoken.base.console import Console
from megatoken.base.errors import ConfigError, DataError, ExitCode
from megatoken.base.system.file_lock import lock_folder
from megatoken.base.system.metrics_log import find_last_rows, read_metrics
from megatoken.cli import Result
from megatoken.cli.arguments import add_options
from megatoken.cli.recipe import RECIPE_HELP
from megatoken.store.run_state import read_config
from megatoken.study.experiment import Run, Slots, train_all

if TYPE_CHECKING:
    from megatoken.data.mixture import Mixture

HELP = "race recipes to a loss: fewest tokens, least time, with p-values"
EXAMPLE = "megatoken race quickstart 'quickstart optim.lr=8e-3' --tokens 2M"
CALIBRATIONS = 3  # short runs that measure the pace of a contender
CALIBRATION_STEPS = 20
VALIDATIONS = (10, 50)  # minimum and maximum number of validations of the longest contender
SHARED_SETTINGS = ("seed", "evaluate.every", "evaluate.tokens")  # must be equal for all contenders
# Only train and validate, and log every step.
FIXED_SETTINGS = (
    "evaluate.tasks=",
    "evaluate.patience=0",
    "evaluate.target_loss=0",
    "sample.every=0",
    "save.mirror=",
    "log.every=1steps",
    "log.plots=false",
)


def add_arguments(parser: ArgumentParser) -> None:
    add_options(parser, __file__, recipes=RECIPE_HELP, time=parse_time)


@dataclass(frozen=True)
class Contender:
    """A recipe with its settings, and its data.

    label: the contender as the user wrote it. arguments: the recipe and its overrides, as
    `megatoken train` takes them.
    """

    label: str
    arguments: tuple[str, ...]
    config: Config
    data: "Mixture"

    @property
    def folder(self) -> str:
        """The name of the folder that holds the contender's runs."""
        return re.sub(r"[^\w.=+-]+", "-", self.label).strip("-.")

    @property
    def texts(self) -> list[Any]:
        """What identifies the text of its datasets, independent of the tokenizer.

        For each dataset, the hash of the input files and the number of documents in each split.
        """
        manifests = [component.dataset.manifest for component in self.data.components]
        return [(manifest.source.get("inputs"), manifest.documents) for manifest in manifests]

    @property
    def n_val(self) -> int:
        """The number of held-out tokens in the dataset that has most of them."""
        return max(len(component.dataset.val) for component in self.data.components)

    @property
    def total_tokens(self) -> int:
        """The number of training tokens of one run."""
        seq_len = self.config.model.seq_len
        epoch_tokens = (len(self.data.train) - 1) // seq_len * seq_len
        return self.config.budget.tokens_before(self.config.total_steps(epoch_tokens=epoch_tokens))


def run(options: Namespace, console: Console) -> Result:
    """Train all unfinished runs, then compare the contenders, and draw and record the result."""
    from megatoken.base.system.device import list_gpus
    from megatoken.study.race_report import report

    if not (options.target_loss or options.tokens or options.minutes):
        fix = "give --target-loss, --tokens or --minutes"
        raise ConfigError("no target", "megatoken race", fix)
    contenders = [open_contender(label, options) for label in options.contenders]
    metric = check_contenders(contenders)
    options.out = options.out or Path("races") / contenders[0].folder
    rounds: Rounds = {}
    slots = Slots(options.jobs, list_gpus(contenders[0].config.machine.device))
    with lock_folder(options.out, "race"):
        if options.minutes:
            contenders = fit_budgets(contenders, options, slots, console)
        if contenders:
            rounds = list_rounds(contenders, options, slots, console)
            train_all(partial(choose_run, rounds), slots, console)
        finished = {
            seed: runs
            for seed, runs in rounds.items()
            if all(run.is_finished for run in runs.values())
        }
        folders = {
            label: [runs[label].folder for runs in finished.values()]
            for label in options.contenders
        }
        data = report(options, metric, list(finished), folders, console)
    return Result(ExitCode.DONE if rounds and finished == rounds else ExitCode.STOPPED, data)


def open_contender(label: str, options: Namespace) -> Contender:
    """Resolve a contender's recipe and open its data. Raises ConfigError and DataError."""
    from megatoken.data.mixture import load_mixture

    recipe, *settings = shlex.split(label)
    overrides = [*options.overrides, *settings]
    if options.tokens and not any(each.partition("=")[0] in ALTERNATIVES for each in overrides):
        overrides.insert(0, f"budget.tokens={options.tokens}")
    config = resolve(recipe, overrides).config
    data = load_mixture(
        config.data.path, external_tokenizer=config.data.tokenizer, cache=config.data.cache
    )
    return Contender(label, (recipe, *overrides), config, data)


@dataclass
class Racer(Run):
    """A run of a race.

    n_turns: turns that it has begun. is_training: whether it is in one.
    """

    n_turns: int = 0
    is_training: bool = False

    def train(self, stopping: threading.Event, environment: dict[str, str]) -> None:
        step = self.status.get("step", 0)
        super().train(stopping, environment)
        now = self.status.get("step", 0)
        val = find_last_rows(self.folder, ["val"]).get("val", {})
        loss = float(val.get("loss", "nan"))
        self.console.print(f"{self.name}: step {now:,}, validation loss {loss:.4f}")
        if self.turn_seconds and now == step:
            self.turn_seconds *= 2  # setup or validation takes longer than a turn
        self.is_training = False


Rounds = dict[int, dict[str, Racer]]  # the runs of a seed by contender label


def choose_run(rounds: Rounds) -> Racer | None:
    """Return the run that trains next, in the first round that has one; None if there is none.

    It is the run that has had the fewest turns.
    """
    for runs in rounds.values():
        free = [run for run in runs.values() if not (run.is_training or run.is_finished)]
        if free:
            run = min(free, key=lambda run: run.n_turns)
            run.n_turns += 1
            run.is_training = True
            return run
    return None


def fit_budgets(
    contenders: Sequence[Contender], options: Namespace, slots: Slots, console: Console
) -> list[Contender]:
    """Return the contenders with the budgets that they train in `--minutes`; empty on a stop.

    Paces are measured once, by CALIBRATIONS runs of each contender below OUT that take turns; the
    fastest counts, because other work on the machine only slows a run down.
    """
    from megatoken.study.race_report import read_pace

    fixed = (*FIXED_SETTINGS, f"budget.steps={CALIBRATION_STEPS}", "evaluate.tokens=0")
    rounds: Rounds = {number: {} for number in range(CALIBRATIONS)}
    for number, runs in rounds.items():
        for contender in contenders:
            settings = [*slots.share_cores(contender.config.machine), *fixed]
            folder = options.out / contender.folder / f"calibration-{number}"
            name = f"{contender.label}, {folder.name}"
            arguments = [*contender.arguments, *settings]
            runs[contender.label] = Racer(folder, arguments, console, name, 0)
    if train_all(partial(choose_run, rounds), slots, console):
        return []
    fitted = []
    for contender in contenders:
        folders = [runs[contender.label].folder for runs in rounds.values()]
        paces = [read_pace(read_metrics(folder, console.warn))[1] for folder in folders]
        tokens = round(60 * options.minutes / min(float(median(pace)) for pace in paces))
        console.print(f"{contender.label}: {tokens:,} tokens in {options.minutes:g} minutes")
        recipe, *overrides = contender.arguments
        overrides.append(f"budget.tokens={tokens}")
        config = resolve(recipe, overrides).config
        fitted.append(replace(contender, arguments=(recipe, *overrides), config=config))
    return fitted


def check_contenders(contenders: Sequence[Contender]) -> str:
    """Check that contenders are comparable, and return the metric to compare.

    The metric is `loss`, or `bits_per_byte` if their tokenizers differ. Raises ConfigError if two
    contenders have the same folder, and DataError if their texts differ or no text is held out.
    """
    first = contenders[0]
    if len({contender.folder for contender in contenders}) < max(2, len(contenders)):
        raise ConfigError("a race takes two or more different recipes", "megatoken race")
    tokenizers = {contender.data.vocabulary.fingerprint for contender in contenders}
    for contender in contenders:
        is_same = len(tokenizers) > 1 or contender.data.fingerprint == first.data.fingerprint
        if not is_same or contender.texts != first.texts:
            raise DataError(f"{contender.data} and {first.data} are different text", "data.path")
        if contender.n_val < 2:
            raise DataError("no held-out text", str(contender.data), "use a larger --val-fraction")
    return "loss" if len(tokenizers) == 1 else "bits_per_byte"


def list_rounds(
    contenders: Sequence[Contender], options: Namespace, slots: Slots, console: Console
) -> Rounds:
    """Return the runs, in the order in which they take their first turns.

    The order rotates from seed to seed. The interval of validations is chosen so that validation
    costs about a third of the training FLOPs of the longest contender. Raises ConfigError if a
    folder holds a run with other settings.
    """
    longest = max(contender.total_tokens for contender in contenders)
    n_val = max(contender.n_val for contender in contenders)
    fewest, most = VALIDATIONS
    every = max(1, longest // min(max(longest // n_val, fewest), most))
    user_keys = {override.partition("=")[0] for override in options.overrides}
    rounds: Rounds = {}
    for index in range(options.seeds):
        seed = contenders[0].config.seed + index
        start = index % len(contenders)
        rounds[seed] = {}
        for contender in [*contenders[start:], *contenders[:start]]:
            shared = {"evaluate.every": f"{every}tok", "evaluate.tokens": contender.n_val}
            own = [f"{key}={value}" for key, value in shared.items() if key not in user_keys]
            own += slots.share_cores(contender.config.machine)
            arguments = [*contender.arguments, *FIXED_SETTINGS, *own, f"seed={seed}"]
            folder = options.out / contender.folder / f"seed-{seed}"
            name = f"{contender.label}, seed {seed}"
            run = Racer(folder, arguments, console, name, int(options.turn))
            check_unchanged(run)
            rounds[seed][contender.label] = run
    return rounds


def check_unchanged(run: Run) -> None:
    """Raise ConfigError if the folder of a run holds one with other settings."""
    if not (run.folder / RUN_CONFIG).is_file():
        return
    config = resolve(run.arguments[0], run.arguments[1:]).config
    for change in list_changes(read_config(run.folder), config):
        if change.key in SHARED_SETTINGS or change.resume != "free":
            what = f"{run.name} has changed: {change}"
            raise ConfigError(what, run.folder, "name another --out")
