"""`megatoken race A B ... --target-loss L | --tokens T`: which recipe reaches a loss with fewer tokens, in less time.

A contender is a recipe, a YAML file or a run folder, with overrides of its own: 'quickstart optim.lr=8e-3'. All are
trained from the same seeds, which decide the order of the data, and validated on all held-out text. Every run is a
`megatoken train` of its own below OUT. They take turns of some minutes, so that all see the same hours of the machine.
The same command goes on after a kill, and with more seeds or contenders trains only those.
"""

import re
import shlex
import threading
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatoken.checkpoint.commit import list_steps
from megatoken.cli import Result
from megatoken.cli.arguments import add_settings
from megatoken.cli.child_runs import find_log, stop_on_signal, train
from megatoken.cli.recipe import RECIPE_HELP
from megatoken.cli.runs import read_config
from megatoken.config.fields import parse_time, parse_value
from megatoken.config.load import ALTERNATIVES, RUN_CONFIG, list_changes, resolve
from megatoken.config.schema import FIELDS, Config
from megatoken.console import Console, format_count
from megatoken.errors import ConfigError, DataError, ExitCode, error_from_code
from megatoken.system.atomic_write import local_path, read_object
from megatoken.system.file_lock import lock_folder
from megatoken.system.metrics_log import STATUS, find_last_rows
from megatoken.train.run_folder import CHECKPOINTS

if TYPE_CHECKING:
    from megatoken.data.mixture import Mixture

# Validations of the longest contender: as many as take a third of its FLOPs, at a third of a training token's for each
# held-out one, but no fewer and no more than these.
VALIDATIONS = (10, 50)
SHARED = ("seed", "evaluate.every", "evaluate.tokens")  # settings that are no contender's own
# Training and validation alone, every step logged, every run by itself.
FIXED = (
    *("evaluate.tasks=", "evaluate.patience=0", "sample.every=0", "save.mirror="),
    *("log.every=1steps", "log.plots=false"),
)


@dataclass(frozen=True, slots=True)
class Contender:
    """A recipe with its overrides, and what they resolve to. label: as its user wrote it."""

    label: str
    recipe: str
    words: tuple[str, ...]
    config: Config
    data: "Mixture"

    @property
    def folder(self) -> str:
        """The name of its runs' folder."""
        return re.sub(r"[^\w.=+-]+", "-", self.label).strip("-.")

    @property
    def texts(self) -> list[Any]:
        """What identifies the text of its data under any tokenizer: hashes of the files, documents in each split."""
        manifests = [part.dataset.manifest for part in self.data.parts]
        return [(manifest.source.get("inputs"), manifest.documents) for manifest in manifests]

    @property
    def total_tokens(self) -> int:
        """That a run of it trains on."""
        seq_len = self.config.model.seq_len
        steps = self.config.total_steps(
            epoch_tokens=(len(self.data.train) - 1) // seq_len * seq_len
        )
        return self.config.budget.tokens_before(steps)


@dataclass(slots=True)
class Run:
    """A contender trained from a seed. turn_seconds: how long at a time; 0: to its end."""

    contender: Contender
    seed: int
    folder: Path
    words: tuple[str, ...]
    turn_seconds: int

    def __str__(self) -> str:
        return f"{self.contender.label}, seed {self.seed}"

    @property
    def step(self) -> int:
        """Of the newest checkpoint; 0 without."""
        return max(list_steps(self.folder / CHECKPOINTS), default=0)

    @property
    def is_finished(self) -> bool:
        """Whether it has reached its end, or losses that are not finite have ended it."""
        status = read_object(self.folder / STATUS)
        return status.get("state") == "done" or status.get("exit_code") == ExitCode.NUMERICS


def race(options: Namespace) -> tuple[int, dict[str, Any]]:
    """Train what is missing, then compare, draw and record. Returns STOPPED when a signal ended it before.

    Raises ConfigError for contenders that cannot be compared or have changed, DataError for their data, StorageError
    when another process races in the folder, and the error of a run that fails.
    """
    from megatoken.cli.race_report import report

    turn_seconds = check_options(options)
    settings = [
        read_settings(text, options) for text in options.contenders
    ]  # all, before any data is opened
    contenders = [
        open_contender(text, *given)
        for text, given in zip(options.contenders, settings, strict=True)
    ]
    metric = check_contenders(contenders, options.console)
    options.out = options.out or Path("races") / contenders[0].folder
    rounds = list_rounds(contenders, options, turn_seconds)
    every = [run for runs in rounds for run in runs]
    stopping = threading.Event()
    with lock_folder(options.out, "race"):
        for run in every:
            check_unchanged(run)
        with stop_on_signal(stopping):
            for runs in rounds:
                run_round(runs, stopping, options.console)
        if left := sum(not run.is_finished for run in every):
            options.console.print(
                f"stopped: {format_count(left, 'run')} to finish; the same command goes on"
            )
        done = [runs for runs in rounds if all(run.is_finished for run in runs)]
        folders = {runs[0].seed: {run.contender.label: run.folder for run in runs} for runs in done}
        answer = report(options, [contender.label for contender in contenders], metric, folders)
    return (ExitCode.STOPPED if left else ExitCode.DONE), answer


def check_options(options: Namespace) -> int:
    """The seconds of a turn. Raises ConfigError for options that cannot be."""
    if options.target_loss is None and options.tokens is None:
        fix = "give --target-loss L, or --tokens T to race to the first contender's loss after T tokens"
        raise ConfigError("no target", "megatoken race", fix)
    if options.target_loss is not None and not 0 < options.target_loss < float("inf"):
        raise ConfigError(
            f"a loss of {options.target_loss:g}", "--target-loss", "give a number above 0"
        )
    with suppress(ValueError):  # of a text that is no number: the recipes' error names it
        if options.tokens is not None and not parse_value(FIELDS["budget.tokens"], options.tokens):
            raise ConfigError(
                "no tokens to train on", "--tokens", "give a number such as 512k or 10e6"
            )
    if options.seeds < 1:
        raise ConfigError(
            f"--seeds is {options.seeds}", "--seeds", "give 1 or more; a p-value takes 2"
        )
    if len(options.contenders) < 2:
        fix = "name two or more recipes, each with its overrides in quotes: 'quickstart optim.lr=8e-3'"
        raise ConfigError("a race of one", options.contenders[0], fix)
    try:
        return int(parse_time(options.turn))
    except ValueError as wrong:
        raise ConfigError(
            str(wrong), "--turn", "write it as 45s, 5m or 1h; 0: whole runs"
        ) from None


def read_settings(text: str, options: Namespace) -> tuple[str, tuple[str, ...], Config]:
    """A contender's recipe, its overrides and what they resolve to. Raises ConfigError."""
    try:
        recipe, *own = shlex.split(text) or [""]
    except ValueError as wrong:
        raise ConfigError(
            f"cannot read {text!r}: {wrong}", "megatoken race", "write 'RECIPE a.b=c ...'"
        ) from None
    for word in own:
        if (key := word.partition("=")[0]) in SHARED:
            raise ConfigError(
                f"{key} is the same for all contenders", text, f"give {word} outside the quotes"
            )
    words = (*options.overrides, *own)
    if options.tokens is not None and not any(
        word.partition("=")[0] in ALTERNATIVES for word in words
    ):
        words = (f"budget.tokens={options.tokens}", *words)
    return recipe, words, resolve(recipe, words).config


def open_contender(text: str, recipe: str, words: tuple[str, ...], config: Config) -> Contender:
    """A contender with its dataset opened. Raises ConfigError and DataError."""
    from megatoken.data.mixture import load_mixture

    data = load_mixture(config.data.path, external_tokenizer=config.data.tokenizer)
    return Contender(text, recipe, words, config, data)


def check_contenders(contenders: Sequence[Contender], console: Console) -> str:
    """What is compared: `loss`, or `bits_per_byte` where the tokenizers differ.

    Raises ConfigError for two of one name, DataError without held-out text and where one tokenizer's data differ.
    """
    first, names = contenders[0], dict[str, str]()
    for each in contenders:
        if each.folder in names:
            what = f"two contenders would share the folder {each.folder!r}: {names[each.folder]!r} and {each.label!r}"
            raise ConfigError(
                what, "megatoken race", "change one, or copy its recipe under another name"
            )
        names[each.folder] = each.label
        if not any(len(part.dataset.val) > 1 for part in each.data.parts):
            fix = "prepare it again with a larger --val-fraction"
            raise DataError(f"no held-out text to compare {each.label!r} on", str(each.data), fix)
    metric = "loss"
    if len({each.data.tokenizer.fingerprint for each in contenders}) > 1:
        console.print("tokenizers differ: losses are in bits per byte of the held-out text")
        metric = "bits_per_byte"
    for each in contenders:
        if each.texts != first.texts or (
            metric == "loss" and each.data.fingerprint != first.data.fingerprint
        ):
            what = f"{each.label!r} trains on {each.data}, {first.label!r} on {first.data}"
            raise DataError(what, "data.path", "give all the same text")
    if len({each.config.model.seq_len for each in contenders}) > 1:
        console.print(
            "contexts differ, so the data are cut into other windows: their order differs, too"
        )
    return metric


def list_rounds(
    contenders: Sequence[Contender], options: Namespace, turn_seconds: int
) -> list[list[Run]]:
    """The runs of each seed, in the order of their turns; the first is another contender's with every seed."""
    given = {word.partition("=")[0] for word in options.overrides}
    held_out = [
        max(len(part.dataset.val) for part in contender.data.parts) for contender in contenders
    ]
    longest, (fewest, most) = max(contender.total_tokens for contender in contenders), VALIDATIONS
    every = max(1, longest // min(max(longest // max(held_out), fewest), most))
    rounds = []
    for index in range(options.seeds):
        seed = contenders[0].config.seed + index
        runs = []
        for contender, tokens in zip(contenders, held_out, strict=True):
            shared = {"evaluate.every": f"{every}tok", "evaluate.tokens": tokens}
            words = (
                *(f"{key}={value}" for key, value in shared.items() if key not in given),
                f"seed={seed}",
            )
            folder = options.out / contender.folder / f"seed-{seed}"
            runs.append(
                Run(contender, seed, folder, (*contender.words, *FIXED, *words), turn_seconds)
            )
        start = index % len(runs)
        rounds.append([*runs[start:], *runs[:start]])
    return rounds


def check_unchanged(run: Run) -> None:
    """Raise ConfigError where the folder holds a run with other settings."""
    if not (run.folder / RUN_CONFIG).is_file():
        return
    changes = list_changes(read_config(run.folder), resolve(run.contender.recipe, run.words).config)
    sizes_unknown = bool(run.contender.config.model.init)  # they are its own: `train` compares them
    differs = [
        str(it) for it in changes if it.key in SHARED or not (it.resume == "free" or sizes_unknown)
    ]
    if differs:
        what = (
            f"{run.contender.label!r} has changed since it was trained here: {'; '.join(differs)}"
        )
        raise ConfigError(what, str(run.folder), "give the same, or name another --out")


def run_round(runs: Sequence[Run], stopping: threading.Event, console: Console) -> None:
    """Train the runs of a seed to their ends, a turn each."""
    while waiting := [run for run in runs if not run.is_finished]:
        for run in waiting:
            if stopping.is_set():
                return
            take_turn(run, stopping, console)


def take_turn(run: Run, stopping: threading.Event, console: Console) -> None:
    """Train a run for its time, or to its end. Raises the error of a run that fails, but for losses not finite."""
    before, limit = run.step, f"save.time_limit={run.turn_seconds or ''}"
    code = train(run.folder, [run.contender.recipe, *run.words, limit], stopping.is_set)
    last = find_last_rows(run.folder, ("train", "val"))
    loss = f"validation loss {last['val']['loss']:.4f}" if "val" in last else ""
    console.print(f"{run}: step {run.step:,}  {loss}")
    if stopping.is_set():
        return
    if code == ExitCode.NUMERICS:
        console.warn(f"{run} ended by losses that are not finite, see {find_log(run.folder)}")
    elif code not in (ExitCode.DONE, ExitCode.STOPPED):
        lines = find_log(run.folder).read_text(errors="replace").strip().splitlines()
        what = (
            f"{run} ended with exit code {code}: {(lines or [''])[-1].removeprefix('error: '):.300}"
        )
        raise error_from_code(
            code if code in {*ExitCode} - {ExitCode.DONE} else ExitCode.PEER, what
        )
    elif run.step == before:
        run.turn_seconds *= 2  # its set-up or validation takes longer than a turn


HELP = "race recipes to a loss: fewest tokens, least time, with p-values"
EXAMPLE = "megatoken race quickstart 'quickstart optim.lr=8e-3' --tokens 2M"


def add_arguments(parser: ArgumentParser) -> None:
    arg = parser.add_argument
    doc = f"recipe, optionally with its own settings in quotes; {RECIPE_HELP}"
    arg("contenders", metavar="RECIPE", nargs="+", help=doc)
    add_settings(parser)
    doc = "target validation loss, nats per token (bits per byte across tokenizers)"
    arg("--target-loss", type=float, metavar="L", help=doc)
    doc = "training tokens, such as 10M; alone, the target is the final loss of the first RECIPE"
    arg("--tokens", metavar="T", help=doc)
    doc = "runs of each RECIPE; a larger number continues a finished race (default 3)"
    arg("--seeds", type=int, default=3, metavar="N", help=doc)
    doc = "time slice of a run; 0: run each to its end (default 5m)"
    arg("--turn", default="5m", metavar="TIME", help=doc)
    doc = "folder of the race and its runs (default races/FIRST)"
    arg("--out", type=local_path, metavar="DIR", help=doc)


def run(options: Namespace, console: Console) -> Result:
    options.console = console
    return Result(*race(options))
