"""Parses the command line: every subcommand, its arguments and their help. No torch."""

import argparse
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from megatoken import __version__
from megatoken.bench.arguments import add_benches
from megatoken.cli.help import HelpFormatter, format_example, format_overview
from megatoken.cli.runs import DEFAULT, SORT_KEYS
from megatoken.config.fields import ConfigField, Duration, parse_value
from megatoken.config.load import format_value, list_recipes
from megatoken.config.presets import PRESETS
from megatoken.config.schema import FIELDS, resume_class
from megatoken.config.words import TEXTS, suggest_choice, suggest_option
from megatoken.console import Console
from megatoken.errors import ConfigError
from megatoken.eval.rewards import REWARDS
from megatoken.eval.tasks import TASKS
from megatoken.launch.local import RESTARTS
from megatoken.launch.scripts import ENGINES
from megatoken.system.atomic_write import local_path
from megatoken.system.object_store import is_address, path_or_address, run_folder

TRANSLATED = {  # options that replace RECIPE by a recipe of another program
    "--llmc": ("FLAGS", "translate the flags of llm.c's train_gpt2cu, as one word in quotes"),
    "--nanogpt": (
        "WORDS",
        "translate nanoGPT's config file, and --name=value words behind it, as one word in quotes",
    ),
    "--composer": ("FILE", "translate a YAML of Composer or llm-foundry"),
}
OVERRIDE = re.compile(r"[A-Za-z_][\w.]*=.*", re.DOTALL)
# Before a ~/ that the shell has left: it expands one only where a word begins with it.
HOME = re.compile(r"(?!\S*(prompt|system)=)(--[a-z][\w-]*|[A-Za-z_][\w.]*)=(?=~/)")
TAKE_OVERRIDES = (
    "quickstart",
    "train",
    "sweep",
    "race",
    "launch",
    "config",
    "describe",
    "dryrun",
    "plan",
)
RECIPE = "(RECIPE | --llmc FLAGS | --nanogpt WORDS | --composer FILE)"
ENDING = "[--json] [--debug] [section.field=value ...]"
Command = Callable[[argparse.Namespace], tuple[int, Any]]  # returns exit code and answer


class Parser(argparse.ArgumentParser):
    """argparse with one-line errors of the form what - where - fix. given: the words that it parses."""

    given: Sequence[str] = ()

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs, allow_abbrev=False)  # else --gpu is --gpus, and --seed --seeds

    def error(self, message: str) -> NoReturn:
        fix = f"see `{self.prog} --help`"
        if "expected one argument" in message:
            fix = "give a value; one that begins with - as --option='-value'"
        if wrong := re.search(
            r"argument (.*?): invalid choice: '(.*)' \(choose from (.*)\)", message
        ):
            choices = re.findall(r"[\w.-]+", wrong[3])
            near = suggest_choice(wrong[2], choices)
            message = (
                f"no {wrong[1].lower()} '{wrong[2]}'"
                if wrong[1].isupper()
                else f"{wrong[1]} cannot be '{wrong[2]}'"
            )
            near = (
                f"train {wrong[2]}"
                if wrong[1] == "COMMAND" and wrong[2] in list_recipes()
                else near
            )
            fix = f"{f'did you mean {near}? ' if near else ''}known: {', '.join(choices)}"
        if number := re.search("invalid (int|float) value: '(.*)'", message):
            fix = f"give a {'whole number' if number[1] == 'int' else 'number such as 0.1'}, {fix}"
        raise ConfigError(message, self.prog, fix)


def parse(words: list[str], commands: Mapping[str, Command]) -> argparse.Namespace:
    """Options of one command, whose function is `call`; `a.b=c` words are accepted anywhere. Raises ConfigError."""
    words = [
        f"{at[0]}{Path(word[at.end() :]).expanduser()}" if (at := HOME.match(word)) else word
        for word in words
    ]
    given, overrides = words, list[str]()
    if words and words[0] in TAKE_OVERRIDES:
        others: list[str] = []
        for previous, word in zip(["", *words], words, strict=False):
            is_value = previous in (
                "--out",
                "--init",
                "--sbatch",
                "--setup",
                "--data",
                "--prompt",
                *TRANSLATED,
            )
            if (
                previous in ("--sbatch", *TRANSLATED) and word.startswith("--") and "=" in word
            ):  # else an option
                others[-1] = f"{previous}={word}"
                continue
            (overrides if OVERRIDE.fullmatch(word) and not is_value else others).append(word)
        words = others
    parser = build_parser(commands)
    options: argparse.Namespace
    options, unknown = parser.parse_known_args(words)
    if unknown and not any(word.startswith("-") for word in unknown):
        options, unknown = parser.parse_known_args(_join_positionals(words, unknown))
    if unknown:
        command = " ".join(
            filter(None, ("megatoken", options.command, getattr(options, "bench", "")))
        )
        known = re.findall(r"--[a-z][\w-]*|\b[A-Z_]{4,}\b", options.help())
        takes_settings = options.command in TAKE_OVERRIDES
        starts = [
            index for index, word in enumerate(unknown) if index == 0 or word.startswith("--")
        ]
        fixes = dict.fromkeys(
            suggest_option(unknown[index:], known, settings=takes_settings) for index in starts
        )
        if options.command == "prepare" and not unknown[0].startswith("-"):
            fixes = dict.fromkeys(
                ["give one SOURCE: a folder, or a pattern in quotes, such as 'texts/*.txt'"]
            )
        if options.command == "sample" and not unknown[0].startswith("-"):
            fixes = dict.fromkeys(
                [f"put the prompt in quotes: {shlex.quote(' '.join([options.prompt, *unknown]))}"]
            )
        fix = "; ".join(filter(None, fixes)) or f"see `{command} --help`"
        raise ConfigError(f"unrecognized arguments: {' '.join(unknown)}", command, fix)
    options.words, options.overrides = given, overrides
    options.console = Console(to_stderr=options.json)
    return options


def _join_positionals(words: list[str], late: list[str]) -> list[str]:
    """The words with `late` before the first option: argparse fills PROMPT or RUN... from the first group only."""
    rest = words[::-1]
    for word in late[::-1]:
        rest.remove(word)
    rest.reverse()
    start = next((index for index, word in enumerate(rest) if word.startswith("-")), len(rest))
    return [*rest[:start], *late, *rest[start:]]


class Program(Parser):
    """`megatoken` itself, whose help is an overview of the commands. docs: one line for each."""

    docs: dict[str, str]

    def format_help(self) -> str:
        return format_overview(self.docs)


def build_parser(commands: Mapping[str, Command]) -> Parser:
    """Every subcommand and option. commands: the function of each command by name."""
    parser = Program(prog="megatoken")
    parser.docs = {}
    parser.add_argument("--version", action="version", version=f"megatoken {__version__}")
    subparsers = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=Parser
    )

    def add(
        name: str,
        doc: str,
        *,
        usage: str | None = None,
        epilog: str = "",
        among: Any = subparsers,
        command: str = "",
    ) -> Parser:
        usage = usage and f"megatoken {name} {usage} {ENDING}"
        if not command:
            parser.docs[name] = doc
            epilog = "\n\n".join(filter(None, (format_example(name), epilog)))
        p: Parser = among.add_parser(
            name,
            help=doc,
            description=doc,
            usage=usage,
            epilog=epilog,
            formatter_class=HelpFormatter,
        )
        p.add_argument(
            "--json", action="store_true", help="progress to stderr, one JSON line to stdout"
        )
        p.add_argument("--debug", action="store_true", help="show the traceback of an error")
        p.set_defaults(call=commands[command or name], help=p.format_help)
        return p

    doc = "train a small GPT on this machine's Python files or your text; sample from it"
    arg = add("quickstart", doc, usage="[--data TEXT] [--prompt TEXT] [--out RUN]").add_argument
    arg(
        "--data",
        metavar="TEXT",
        help="your text, or a dataset: any SOURCE of `prepare` (default python)",
    )
    arg(
        "--prompt",
        metavar="TEXT",
        help="text to continue (default: the recipe's, or how your held-out text begins)",
    )
    arg(
        "--out",
        type=local_path,
        help="run folder (default runs/quickstart, of your text runs/NAME)",
    )
    arg = add("completion", "print a script for the shell that completes words").add_argument
    arg("shell", choices=("bash", "zsh"))
    _add_prepare(add)
    _add_training(add)
    _add_searches(add)
    _add_models(add)
    doc = parser.docs["bench"] = "benchmark training on this machine, as a whole and by part"
    p = subparsers.add_parser(
        "bench", help=doc, epilog=format_example("bench"), formatter_class=HelpFormatter
    )
    benches = p.add_subparsers(dest="bench", required=True, metavar="BENCH", parser_class=Parser)
    add_benches(lambda name, doc: add(name, doc, among=benches, command="bench"))
    arg = add("doctor", "check that this machine can train; a remedy for each problem").add_argument
    arg(
        "folder",
        metavar="DIR",
        nargs="?",
        type=local_path,
        default=Path(),
        help="where to train (default .)",
    )
    _add_runs(add)
    arg = add("verify", "check every hash of a dataset, run or checkpoint folder").add_argument
    doc = "folder, or an address such as s3://bucket/data"
    arg("folder", metavar="DIR", type=path_or_address, help=doc)
    arg = add("plot", "plot the curves of one or more runs in one picture").add_argument
    arg("runs", metavar="RUN", nargs="+", type=local_path)
    arg("--x", choices=("tokens", "steps", "seconds"), help="horizontal axis (default tokens)")
    arg("--out", type=local_path, help="PNG to write (default plots/curves.png in the first RUN)")
    doc = "also plot weights of the first run; of any MODEL of `sample` these alone, in --out (default plots/MODEL)"
    arg("--pictures", action="store_true", help=doc)
    arg = add("sync", "send the metrics of a run to tensorboard, wandb or trackio").add_argument
    arg("run", metavar="RUN", type=local_path)
    arg("--to", required=True, metavar="SINKS", help="of tensorboard, wandb, trackio, with commas")
    arg("--follow", action="store_true", help="go on until the run has ended; with one sink")
    arg = add(
        "report", "write runs as one page that opens offline: curves, samples, scores, cost"
    ).add_argument
    arg("runs", metavar="RUN", nargs="+", type=local_path)
    arg(
        "--out",
        type=local_path,
        default=Path("report.html"),
        metavar="FILE",
        help="page to write (default report.html)",
    )
    arg(
        "--serve",
        type=int,
        nargs="?",
        const=8765,
        metavar="PORT",
        help="show it on this machine while runs go on",
    )
    arg("--price", type=float, metavar="DOLLARS", help="of an hour of one process, for the cost")
    arg("--ladder", type=local_path, metavar="FILE", help="record of `bench ladder` to show")
    doc = "fit loss against parameters and tokens of runs, and extrapolate"
    arg = add("scaling", doc).add_argument
    arg("runs", metavar="RUN", nargs="+", type=local_path)
    doc = (
        "extrapolate to this many training FLOPs (6 N D; default 10 and 100 times the largest run)"
    )
    arg("--flops", type=float, nargs="+", default=[], metavar="C", help=doc)
    arg("--plot", type=local_path, metavar="FILE", help="picture of runs and law")
    return parser


def _length(text: str) -> Duration:
    """A length of training above 0."""
    try:
        length = parse_value(
            ConfigField(Duration(0), "", low=0, open_low=True, type=Duration), text
        )
    except ValueError as wrong:
        raise argparse.ArgumentTypeError(str(wrong)) from None
    assert isinstance(length, Duration)
    return length


def _add_runs(add: Callable[..., Parser]) -> None:
    arg = add("runs", "list runs, or compare the settings and losses of some").add_argument
    doc = "folder with runs at any depth (default runs); two or more RUNs are compared"
    arg("folders", metavar="DIR", nargs="*", type=local_path, default=[DEFAULT], help=doc)
    doc = f"column to sort by, the best first: {', '.join(SORT_KEYS)} (default: by folder)"
    arg("--sort", metavar="COLUMN", choices=list(SORT_KEYS), help=doc)


def _add_prepare(add: Callable[..., Parser]) -> None:
    arg = add("prepare", "tokenize text into shards").add_argument
    sources = (
        "file, folder or glob of .txt .md .json .jsonl .csv .tsv (also .gz, .zst) .parquet, or "
    )
    arg(
        "source",
        metavar="SOURCE",
        help=sources
        + "python, tinyshakespeare, exercises (sums and spelling as conversations; exercises-prompts and "
        + "exercises-test: as prompts with answers), tinystories, fineweb, "
        + "fineweb-edu (of 10B tokens; -100bt, -350bt, -full)",
    )
    doc = "dataset folder to write, or an address such as s3://bucket/data"
    arg("--out", required=True, type=path_or_address, help=doc)
    arg(
        "--tokenizer",
        default="gpt2",
        help="gpt2, bytes, bpe:N, a tokenizer.json, dataset or RUN (default gpt2)",
    )
    arg(
        "--workers",
        type=int,
        default=0,
        help="processes; does not change the result (default 0: all cores)",
    )
    arg(
        "--val-fraction",
        type=float,
        default=0.01,
        help="share of documents for validation (default 0.01)",
    )
    arg(
        "--shard-tokens", type=int, default=100_000_000, help="tokens per shard (default 100000000)"
    )
    doc = "what to do with text that is not UTF-8 (default replace); skip also skips rows that cannot be used"
    arg("--invalid", choices=("replace", "skip", "fail"), default="replace", help=doc)
    arg("--text-key", default="text", help="field or column that holds the text (default text)")
    arg(
        "--context",
        type=int,
        metavar="N",
        help="of chats: tokens in a row (default: the context of RUN)",
    )
    doc = "of chats: what to do with those longer than the context (default fail); nothing is cut"
    arg("--long", choices=("fail", "skip"), default="fail", help=doc)
    arg("--root", type=local_path, help="local copy of a named source, laid out like the original")


def _add_training(add: Callable[..., Parser]) -> None:
    """train, config, launch, describe, dryrun: commands that take a recipe."""
    recipe_doc = f"a .yaml file, the folder of a run to go on with, or a built-in recipe: {', '.join(list_recipes())}"
    preset_doc = f"{', '.join(PRESETS)}, or a recipe"
    usage = f"{RECIPE} [--out RUN] [--init RUN_OR_HF_DIR] [--nproc N] [--extend LENGTH] [--reward NAME] ..."
    train = add(
        "train", "train a recipe, or go on with a run", usage=usage, epilog=describe_fields()
    )
    config = add("config", "print every value of a recipe and where it comes from", usage=RECIPE)
    for p in (train, config):
        p.add_argument("recipe", metavar="RECIPE", nargs="?", help=recipe_doc)
        for name, (metavar, doc) in TRANSLATED.items():
            p.add_argument(name, metavar=metavar, help=doc)
    config.set_defaults(nproc=1)
    arg = train.add_argument
    arg("--out", type=run_folder, help="run folder (default runs/RECIPE, or the run)")
    arg("--init", metavar="RUN_OR_HF_DIR", help="initial weights; the same as model.init=...")
    arg(
        "--nproc",
        type=int,
        default=1,
        metavar="N",
        help="processes on this machine, one per GPU (default 1)",
    )
    doc = f"of --nproc's processes in a row without progress, when one hangs or is lost (default {RESTARTS})"
    arg("--restarts", type=int, metavar="N", help=doc)
    doc = "train a run that has reached its end this much longer: 2000steps, 1e9tok, 0.5ep, or 0.5dur of its length"
    arg("--extend", metavar="LENGTH", type=_length, help=doc)
    doc = f"of grpo and ppo: {', '.join(REWARDS)}, or your module:function of (prompt, answer, right); recipes run none"
    arg("--reward", metavar="NAME", help=doc)
    arg(
        "--overfit-batch",
        action="store_true",
        help="train on the first batch only, a check: data.order=one-batch",
    )
    arg(
        "--allow-changes",
        action="store_true",
        help="resume with other values of guarded fields, or other data",
    )
    arg(
        "--ending", type=local_path, help=argparse.SUPPRESS
    )  # where a stop is noted (launch/local.py)
    arg(
        "--explain",
        action="store_true",
        help="print the measurements behind every setting left at auto",
    )
    usage = "ENGINE RECIPE [--nodes N] [--nproc N] [--write FILE] ..."
    arg = add("launch", "write a script that trains on many machines", usage=usage).add_argument
    arg("engine", choices=list(ENGINES), help="torchrun (any machines), slurm, k8s or skypilot")
    arg("recipe", metavar="RECIPE", help=recipe_doc)
    arg("--nodes", type=int, default=1, help="machines (default 1)")
    arg("--nproc", type=int, default=8, help="processes on each, one per GPU (default 8)")
    arg("--out", type=run_folder, help="run folder, shared by all machines (default runs/RECIPE)")
    arg("--write", type=local_path, metavar="FILE", help="file for the script (default: stdout)")
    arg("--gpus", help="for skypilot: GPU type (default H100); of any engine none: no GPUs")
    arg("--time", help="for slurm: time limit (default 24:00:00)")
    arg("--partition", default="", help="for slurm: partition")
    arg("--account", default="", help="for slurm: account to charge")
    doc = "for slurm: another option of sbatch, such as qos=high, constraint=a100 or exclusive; may be repeated"
    strip = partial(re.sub, "^--", "")
    arg("--sbatch", action="append", default=[], type=strip, metavar="NAME=VALUE", help=doc)
    doc = "line of shell before the run, such as 'module load cuda' or 'source .venv/bin/activate'; may be repeated"
    arg(
        "--setup",
        action="append",
        default=[],
        metavar="LINE",
        help=f"for slurm, torchrun and skypilot: {doc}",
    )
    arg(
        "--image",
        default="",
        help="for k8s and skypilot: container image with megatoken (k8s: default megatoken)",
    )
    arg("--namespace", default="", help="for k8s: namespace")
    doc = "parameters, FLOPs and memory of a preset or recipe"
    arg = add(
        "describe", doc, usage="(PRESET_OR_RECIPE [--tensors] | MODEL --tensors)"
    ).add_argument
    arg(
        "preset",
        metavar="PRESET_OR_RECIPE",
        help=f"{preset_doc}; with --tensors also any MODEL of `sample`",
    )
    arg(
        "--tensors",
        action="store_true",
        help="list names, shapes, dtypes and numbers of all tensors",
    )
    doc = "estimate memory and traffic of one GPU of many, without any"
    usage = "PRESET_OR_RECIPE --gpus N [--tp N] [--shard KIND] [--gpu NAME] ..."
    arg = add("dryrun", doc, usage=usage).add_argument
    arg("preset", metavar="PRESET_OR_RECIPE", help=preset_doc)
    arg("--gpus", type=int, default=1, help="processes, one per GPU (default 1)")
    arg("--tp", type=int, help="the same as machine.tensor_parallel=...")
    arg("--shard", help="the same as machine.sharding=...")
    arg(
        "--gpu",
        default="h100",
        help="GPU that it must fit on: a name or a number of GB (default h100)",
    )
    doc = "what a run will take on some GPUs: fit, speed, hours, dollars"
    usage = "RECIPE (--gpus 8xA100-40GB | --calibrate) [--tokens N] [--price USD] "
    usage += "[--deadline TIME] [--budget USD] [--law NAME] [--plot FILE] ..."
    arg = add("plan", doc, usage=usage).add_argument
    arg("recipe", metavar="RECIPE_OR_PRESET", help=recipe_doc + ", or a preset")
    arg("--gpus", metavar="NxNAME", help="number and kind, such as 8xA100-40GB")
    arg(
        "--tokens",
        help="training tokens, such as 10e9, or chinchilla: 20 a parameter (default: the recipe's)",
    )
    arg("--price", type=float, metavar="USD", help="of a GPU-hour (default: a list with its date)")
    arg("--deadline", metavar="TIME", help="find the fewest GPUs that end within it, such as 24h")
    arg(
        "--budget",
        type=float,
        metavar="USD",
        help="find the compute-optimal model and its tokens for it",
    )
    doc = "for --budget: 20 tokens a parameter, or the law fitted by Hoffmann et al. (default chinchilla)"
    arg("--law", choices=("chinchilla", "fitted"), help=doc)
    arg(
        "--plot",
        type=local_path,
        metavar="FILE",
        help="PNG of speed and hours over the number of GPUs",
    )
    doc = "folder with records of `megatoken bench batch` on such a GPU, which correct the speed (default records)"
    arg("--records", type=local_path, metavar="DIR", help=doc)
    arg(
        "--calibrate",
        action="store_true",
        help="measure this machine for half a minute, and plan for it",
    )


def _add_searches(add: Callable[..., Parser]) -> None:
    """sweep, race: commands that train many runs."""
    recipe_doc = (
        f"a .yaml file, the folder of a run, or a built-in recipe: {', '.join(list_recipes())}"
    )
    doc = "search settings by short runs: optim.lr=log:1e-4..1e-2, or A..B, or A|B|C (each once)"
    arg = add(
        "sweep", doc, usage="RECIPE [--trials N] [--jobs N] [--out DIR] section.field=RANGE ..."
    ).add_argument
    arg("recipe", metavar="RECIPE", help=recipe_doc)
    arg(
        "--trials",
        type=int,
        default=20,
        help="runs in all; a larger number goes on with a finished sweep (default 20)",
    )
    arg(
        "--jobs",
        type=int,
        default=1,
        help="runs at a time, which share the CPU's threads (default 1)",
    )
    arg("--seed", type=int, default=0, help="of the search (default 0)")
    arg(
        "--out",
        type=local_path,
        metavar="DIR",
        help="folder of the search and its runs (default sweeps/RECIPE)",
    )
    doc = "race recipes to a loss: fewest tokens, least time, with p-values"
    usage = (
        "RECIPE 'RECIPE a.b=c ...' ... (--target-loss L | --tokens T) [--seeds N] [--out DIR] ..."
    )
    arg = add("race", doc, usage=usage).add_argument
    arg(
        "contenders",
        metavar="RECIPE",
        nargs="+",
        help="as of `sweep`, with settings of its own in quotes",
    )
    doc = "validation loss to reach, in nats per token; of different tokenizers in bits per byte"
    arg("--target-loss", type=float, metavar="L", help=doc)
    doc = "to train on, such as 10M (default: as each recipe); alone: the target is the first RECIPE's last loss"
    arg("--tokens", metavar="T", help=doc)
    doc = "runs of each RECIPE; a larger number goes on with a finished race (default 3)"
    arg("--seeds", type=int, default=3, metavar="N", help=doc)
    arg(
        "--turn",
        default="5m",
        metavar="TIME",
        help="how long one trains before the next, 0: to its end (default 5m)",
    )
    arg(
        "--out",
        type=local_path,
        metavar="DIR",
        help="folder of the race and its runs (default races/FIRST)",
    )


def _add_server(add: Callable[..., Parser]) -> Parser:
    """serve."""
    serve = add("serve", "put a model behind HTTP: OpenAI's interface, and a page to talk on")
    arg = serve.add_argument
    arg("model", metavar="MODEL", help="run folder, checkpoint, or any other MODEL of `sample`")
    doc = "address to listen on (default 127.0.0.1: this machine alone); others need --api-key"
    arg("--host", default="127.0.0.1", help=doc)
    arg("--port", type=int, default=8000, help="0: a free one (default 8000)")
    arg("--api-key", metavar="KEY", help="what clients must send (default: nothing)")
    arg(
        "--parallel",
        type=int,
        default=8,
        metavar="N",
        help="answers that are decoded at once (default 8)",
    )
    arg(
        "--queue",
        type=int,
        default=64,
        metavar="N",
        help="requests that may wait; others are refused (default 64)",
    )
    return serve


def _add_models(add: Callable[..., Parser]) -> None:
    """sample, chat, serve, eval, export, consolidate: commands that take a model."""
    sample = add("sample", "generate text from a trained model")
    evaluate = add("eval", "score a model on tasks, or compute its loss on shards or text")
    arg = sample.add_argument
    doc = "run folder or its save.mirror, Hugging Face folder or hub name, llm.c's .bin, nanoGPT's ckpt.pt"
    arg("model", metavar="MODEL", help=doc)
    arg(
        "prompt",
        metavar="PROMPT",
        nargs="?",
        default="-",
        help="text to continue (default -: stdin)",
    )
    arg("--tokens", type=int, default=128, help="new tokens per sequence (default 128)")
    arg("--temperature", type=float, default=0.8, help="0: greedy (default 0.8)")
    arg(
        "--top-k",
        type=int,
        default=50,
        help="sample from the k likeliest tokens; 0: all (default 50)",
    )
    arg(
        "--top-p",
        type=float,
        default=1.0,
        help="sample from the likeliest tokens that sum to p (default 1)",
    )
    arg("--seed", type=int, default=0, help="same seed, same text (default 0)")
    arg("-n", "--n", type=int, default=1, help="sequences (default 1)")
    arg(
        "--int8",
        action="store_true",
        help="hold weights in 8 bits: faster on a CPU, nearly the same text",
    )
    usage = "MODEL [-p TEXT] [--system TEXT] [--tokens N] [--temperature T] ..."
    talk = add("chat", "talk to a chat model in the terminal, or ask it once", usage=usage)
    arg = talk.add_argument
    arg(
        "model",
        metavar="MODEL",
        help="run folder, checkpoint, or any other MODEL of `sample`, with a chat template",
    )
    doc = "ask this alone and print the answer (default: talk, or ask what is piped in)"
    arg("-p", "--prompt", metavar="TEXT", help=doc)
    arg("--system", metavar="TEXT", help="the system's message, before all others")
    arg("--tokens", type=int, default=256, help="new tokens per answer at most (default 256)")
    arg("--temperature", type=float, default=0.8, help="0: greedy (default 0.8)")
    arg(
        "--top-k",
        type=int,
        default=50,
        help="sample from the k likeliest tokens; 0: all (default 50)",
    )
    arg(
        "--top-p",
        type=float,
        default=1.0,
        help="sample from the likeliest tokens that sum to p (default 1)",
    )
    arg("--seed", type=int, default=0, help="same seed, same answers (default 0)")
    arg = evaluate.add_argument
    doc = "run folder, checkpoint, or any other MODEL of `sample`; several: one table"
    arg("models", metavar="MODEL", nargs="+", help=doc)
    arg(
        "--plot",
        type=local_path,
        metavar="FILE",
        help="PNG of the scores, or the loss, over the models' sizes",
    )
    arg("--tasks", metavar="NAMES", help=f"comma-separated, of {', '.join(TASKS)}")
    doc = "with --tasks: file of examples (.jsonl or .parquet), or folder with TASK.jsonl (default: the Hugging "
    doc += "Face hub); without: shards, also at an address, or text in a format that `megatoken prepare` reads "
    doc += "(default: what the run trained on)"
    arg("--data", type=path_or_address, metavar="PATH", help=doc)
    arg(
        "--limit",
        type=int,
        default=0,
        metavar="N",
        help="only the first N examples of each task, prompts of --chat, or N tokens spread over the data; 0: all",
    )
    arg(
        "--split",
        choices=("train", "val"),
        help="split of the shards (default val, where there is one)",
    )
    arg(
        "--examples",
        action="store_true",
        help="also return the predictions for each example, in file order",
    )
    arg(
        "--no-token-mean",
        action="store_true",
        help="skip acc_token_mean: halves the time of HellaSwag",
    )
    arg("--nproc", type=int, default=1, metavar="N", help="processes on this machine (default 1)")
    doc = "let a chat model answer: .jsonl rows of `prompt` and `answer` or of conversations, a dataset of prompts, or "
    arg("--chat", metavar="SOURCE", help=doc + "exercises-test")
    doc = f"with --chat: what makes an answer right, {', '.join(REWARDS)}, or your module:function (default exact)"
    arg("--reward", metavar="NAME", help=doc)
    arg(
        "--samples",
        type=int,
        metavar="N",
        help="with --chat: sample N answers to each prompt, too, for pass@k",
    )
    arg(
        "--temperature",
        type=float,
        metavar="T",
        help="with --samples: of the sampled answers (default 1)",
    )
    arg(
        "--tokens",
        type=int,
        metavar="N",
        help="with --chat: new tokens per answer at most (default 256)",
    )
    arg(
        "--harness",
        action="store_true",
        help="evaluate by lm-evaluation-harness, on any of its tasks",
    )
    arg(
        "--no-template",
        action="store_true",
        help="with --harness: plain prompts, though the model has a chat template",
    )
    arg(
        "--include",
        type=local_path,
        metavar="DIR",
        help="with --harness: folder with your task files",
    )
    arg("--fewshot", type=int, metavar="K", help="with --harness: solved examples in each prompt")
    for p in (sample, talk, _add_server(add), evaluate):
        p.add_argument(
            "--device", default="auto", help="auto, cpu, cuda, cuda:N or mps (default auto)"
        )
        p.add_argument(
            "--precision",
            default="fp32",
            choices=("auto", "fp32", "bf16", "fp16"),
            help="default fp32",
        )
    arg = add("export", "write a model in the format of another program, and check it").add_argument
    arg(
        "model",
        metavar="RUN_OR_CHECKPOINT",
        help="run folder, checkpoint, or any other MODEL of `sample`",
    )
    doc = "hf: for transformers, vLLM and llama.cpp; llmc: for llm.c (default hf)"
    arg("--to", choices=("hf", "llmc"), default="hf", help=doc)
    arg(
        "--out",
        type=local_path,
        required=True,
        metavar="DIR",
        help="folder to write; it must not exist",
    )
    arg(
        "--dtype",
        choices=("fp32", "bf16"),
        default="fp32",
        help="dtype of the weights (default fp32)",
    )
    doc = "merge a checkpoint of many processes into one file"
    arg = add("consolidate", doc).add_argument
    arg(
        "source",
        metavar="RUN_OR_CHECKPOINT",
        type=local_path,
        help="run folder (newest checkpoint), or its step-N",
    )
    arg("--out", required=True, type=local_path, help="folder to write step-N into")


def check_eval(options: argparse.Namespace) -> None:
    """Raise ConfigError for an option of `eval` that has no effect beside the others."""
    if options.limit < 0:
        raise ConfigError(
            f"--limit is {options.limit}", "megatoken eval", "give a number, or 0 for all"
        )
    if options.tasks == "" or (options.harness and not options.tasks):
        what = "--tasks is empty" if options.tasks == "" else "--harness without --tasks"
        fix = f"name tasks: {'any of the harness' if options.harness else ', '.join(TASKS)}"
        raise ConfigError(what, "megatoken eval", fix)
    if texts := [name for name in options.models if Path(name).suffix in TEXTS]:
        fix = f"give a model, and the text as --data {shlex.quote(texts[0])}"
        raise ConfigError("text, not a model", texts[0], fix)
    if not options.tasks and not options.data and not options.chat:
        missing = [
            name for name in options.models if not is_address(name) and not Path(name).exists()
        ]
        what = f"nothing to evaluate on{f', and no run {missing[0]!r} here' if missing else ''}"
        fix = f"give --tasks ({', '.join(TASKS)}), --data with shards or text, or --chat with prompts and answers"
        raise ConfigError(what, "megatoken eval", fix)
    if options.tasks and options.data and is_address(options.data):
        raise ConfigError(
            "examples of tasks are read from this machine", "--data", "copy them to a local folder"
        )
    has_tasks, in_harness, answers = bool(options.tasks), options.harness, bool(options.chat)
    beside_chat = (
        ("--tasks", has_tasks),
        ("--data", options.data),
        ("--harness", in_harness),
        ("--plot", options.plot),
    )
    refuse_without_effect(
        *(
            (flag, given, not answers, "an evaluation without --chat")
            for flag, given in beside_chat
        ),
        ("--reward", options.reward is not None, answers, "--chat"),
        ("--samples", options.samples is not None, answers, "--chat"),
        ("--tokens", options.tokens is not None, answers, "--chat"),
        (
            "--temperature",
            options.temperature is not None,
            answers and bool(options.samples),
            "--chat with --samples",
        ),
        ("--no-template", options.no_template, in_harness, "--harness"),
        ("--split", options.split, not has_tasks and not answers, "--data without --tasks"),
        ("--examples", options.examples, has_tasks or answers, "--tasks or --chat"),
        (
            "--no-token-mean",
            options.no_token_mean,
            has_tasks and not in_harness,
            "--tasks without --harness",
        ),
        ("--plot", options.plot, not in_harness, "our own scores and losses"),
        ("--fewshot", options.fewshot is not None, in_harness, "--harness"),
        ("--include", options.include, in_harness, "--harness"),
    )


def refuse_without_effect(*rows: tuple[str, Any, bool, str]) -> None:
    """Raise ConfigError for an option in vain. rows: option, given?, has it an effect?, what it is for."""
    for flag, given, has_effect, purpose in rows:
        if given and not has_effect:
            raise ConfigError(
                f"{flag} has no effect here", flag, f"leave it out: it is for {purpose}"
            )


def describe_fields() -> str:
    """The help of every config field by section: key, default, class on a resume, meaning, unit, choices."""
    title = "fields (section.field=value), as in a recipe; a resume may change free ones, guarded by --allow-changes:"
    lines, section = [title], ""
    for key, spec in FIELDS.items():
        head = key.rpartition(".")[0]
        if head and head != section:
            section = head
            lines.append(f"\n {section}")
        unit = f" [{spec.unit}]" if spec.unit else ""
        choices = (
            f" {{{spec.expects.removeprefix('one of ')}}}"
            if spec.expects.startswith("one of")
            else ""
        )
        lines.append(
            f"  {key + '=' + format_value(spec.default):<28} {resume_class(key):<7} {spec.doc}{unit}{choices}"
        )
    return "\n".join(lines)
