"""The words of a command line into options: every subcommand, its arguments and their help.

In: words, and the function of each command (cli.py). Out: options, or a Fault(CONFIG) in one line. Absent: torch, and
anything that takes longer than reading.
"""

import argparse
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from megatoken import __version__
from megatoken.bench.options import add_benches
from megatoken.config import KNOBS, SCIENCE
from megatoken.errors import Exit, Fault
from megatoken.evaluate.tasks import TASKS
from megatoken.parallel.scripts import ENGINES
from megatoken.presets import PRESETS
from megatoken.recipe import format_value, list_recipes

FOREIGN = {  # another program's recipe in place of ours: its words and what they are
    "--llmc": ("FLAGS", "translate the flags of llm.c's train_gpt2cu, as one word in quotes"),
    "--nanogpt": ("WORDS", "translate nanoGPT's config file, and --name=value words behind it, as one word in quotes"),
    "--composer": ("FILE", "translate a YAML of Composer or llm-foundry"),
}
OVERRIDE = re.compile(r"[A-Za-z_][\w.]*=.*", re.DOTALL)
RECIPE = "(RECIPE | --llmc FLAGS | --nanogpt WORDS | --composer FILE)"
Call = Callable[[argparse.Namespace], tuple[int, Any]]


class Parser(argparse.ArgumentParser):
    """argparse, with errors in our words."""

    def error(self, message: str) -> NoReturn:
        fix = f"see `{self.prog} --help`"
        if "expected one argument" in message:
            fix = "write a value that begins with - as --option='-value'"
        raise Fault(Exit.CONFIG, message, self.prog, fix)


def parse(words: list[str], calls: Mapping[str, Call]) -> argparse.Namespace:
    """Options of one command, whose function is `call`; where a recipe is taken, `a.b=c` words may stand anywhere."""
    overrides: list[str] = []
    if words and words[0] in ("train", "launch", "config", "describe", "dryrun"):
        takes_value = {word for word in words if word in ("--out", "--init", *FOREIGN)}
        kept: list[str] = []
        for previous, word in zip(["", *words], words, strict=False):
            is_override = OVERRIDE.fullmatch(word) and previous not in takes_value
            (overrides if is_override else kept).append(word)
        words = kept
    options = build_parser(calls).parse_args(words)
    options.overrides = overrides
    return options


def build_parser(calls: Mapping[str, Call]) -> Parser:
    """Every subcommand and option. calls: by name, the function of each command."""
    parser = Parser(prog="megatoken", description="Pre-train GPTs from raw text: prepare, train, sample.")
    parser.add_argument("--version", action="version", version=f"megatoken {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)

    def add(name: str, doc: str, *, epilog: str = "", among: Any = commands, call: str = "") -> Parser:
        raw = argparse.RawDescriptionHelpFormatter
        command: Parser = among.add_parser(name, help=doc, description=doc, epilog=epilog, formatter_class=raw)
        command.add_argument("--json", action="store_true", help="progress to stderr, one JSON line to stdout")
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
        command.set_defaults(call=calls[call or name])
        return command

    recipe_doc = f"a .yaml file, or one of ours: {', '.join(list_recipes())}"
    p = add("prepare", "turn text into shards of tokens")
    p.add_argument("source", metavar="SOURCE", help="file, folder or glob of .txt .md .jsonl(.gz|.zst) .parquet, or "
                   "python, tinyshakespeare, tinystories, fineweb, fineweb-edu")  # fmt: skip
    p.add_argument("--out", required=True, type=Path, help="dataset folder to write")
    p.add_argument("--tokenizer", default="gpt2", help="gpt2, bytes, bpe:N or a tokenizer.json (default gpt2)")
    p.add_argument("--workers", type=int, default=0, help="processes; the result does not depend on it (0: all cores)")
    p.add_argument("--val-fraction", type=float, default=0.01, help="share of documents held out (default 0.01)")
    p.add_argument("--shard-tokens", type=int, default=100_000_000, help="tokens per shard (default 100000000)")
    p.add_argument("--invalid", choices=("replace", "skip", "fail"), default="replace",
                   help="text that is not UTF-8 (default replace); skip passes over bad JSON lines too")  # fmt: skip
    p.add_argument("--text-key", default="text", help="field or column that holds the text (default text)")
    p.add_argument("--root", type=Path, help="local copy of a named source, laid out like the original")
    p.add_argument("--part", type=read_part, metavar="K/N", help="prepare only the K-th of N parts, wherever; the same "
                   "command without it then puts them together")  # fmt: skip
    _add_train(add, recipe_doc)
    _add_launch(add, recipe_doc)
    p = add("config", "print the resolved values of a recipe and where each comes from")
    p.usage = f"megatoken config {RECIPE} [--json] [--debug] [section.field=value ...]"
    _add_recipe(p, recipe_doc)
    p.set_defaults(nproc=1)
    p = add("describe", "parameters, FLOPs and memory of a preset or recipe")
    p.usage = "megatoken describe PRESET_OR_RECIPE [--json] [--debug] [section.field=value ...]"
    p.add_argument("preset", metavar="PRESET_OR_RECIPE", help=f"{', '.join(PRESETS)}, or a recipe")
    _add_dryrun(add)
    _add_sample(add)
    _add_eval(add)
    _add_export(add)
    p = commands.add_parser("bench", help="measure this machine: a ladder of speed-ups, and each part alone")
    benches = p.add_subparsers(dest="bench", required=True, metavar="BENCH", parser_class=Parser)
    add_benches(lambda name, doc: add(name, doc, among=benches, call="bench"))
    p = add("doctor", "check what a run needs of this machine, each lack with its remedy")
    p.add_argument("folder", metavar="DIR", nargs="?", type=Path, default=Path(), help="where to train (default .)")
    p = add("verify", "check every hash of a dataset or run folder")
    p.add_argument("folder", metavar="DIR", type=Path)
    p = add("consolidate", "write a checkpoint of many processes as one would have: all weights in one file")
    p.add_argument("source", metavar="RUN_OR_CHECKPOINT", type=Path, help="run folder (its newest), or a step-N of it")
    p.add_argument("--out", required=True, type=Path, help="folder to write step-N into")
    p = add("plot", "draw the curves of one or several runs into one picture")
    p.add_argument("runs", metavar="RUN", nargs="+", type=Path)
    p.add_argument("--out", type=Path, help="PNG to write (default RUN/plots/curves.png of the first)")
    p.add_argument("--pictures", action="store_true", help="also position embeddings and a weight matrix of the first")
    return parser


def read_part(text: str) -> tuple[int, int]:
    """3/16 -> (3, 16)."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected K/N, got '{text}'")
    return int(match[1]), int(match[2])


def _add_train(add: Callable[..., Parser], recipe_doc: str) -> None:
    p = add("train", "train a recipe, or go on with it", epilog=describe_fields())
    _add_recipe(p, recipe_doc)
    p.add_argument("--out", type=Path, help="run folder (default runs/RECIPE)")
    p.add_argument("--init", metavar="RUN_OR_HF_DIR", help="start from these weights; the same as model.init=...")
    p.add_argument("--nproc", type=int, default=1, metavar="N",
                   help="processes on this machine, one a GPU (default 1)")  # fmt: skip
    p.add_argument("--ending", type=Path, help=argparse.SUPPRESS)  # where a stop is noted (parallel/stopping.py)
    p.add_argument("--explain", action="store_true", help="say what was measured for every choice left to auto")
    p.usage = (f"megatoken train {RECIPE} [--out RUN] [--init RUN_OR_HF_DIR] [--nproc N] [--explain] [--json] "
               "[--debug] [section.field=value ...]")  # fmt: skip


def _add_recipe(p: Parser, recipe_doc: str) -> None:
    p.add_argument("recipe", metavar="RECIPE", nargs="?", help=recipe_doc)
    for name, (metavar, doc) in FOREIGN.items():
        p.add_argument(name, metavar=metavar, help=doc)


def _add_launch(add: Callable[..., Parser], recipe_doc: str) -> None:
    p = add("launch", "write a script that trains on many machines by an engine you have")
    p.add_argument("engine", choices=list(ENGINES), help="torchrun (any machines), slurm, k8s or skypilot")
    p.add_argument("recipe", metavar="RECIPE", help=recipe_doc)
    p.add_argument("--nodes", type=int, default=1, help="machines (default 1)")
    p.add_argument("--nproc", type=int, default=8, help="processes on each, one a GPU (default 8)")
    p.add_argument("--out", type=Path, help="run folder, seen by all machines (default runs/RECIPE)")
    p.add_argument("--write", type=Path, metavar="FILE", help="where to write the script (default to the screen)")
    p.add_argument("--gpus", default="H100", help="for skypilot: kind of GPU (default H100); none: ask for no GPUs")
    p.add_argument("--time", default="24:00:00", help="for slurm: time limit (default 24:00:00)")
    p.add_argument("--image", default="pytorch/pytorch:latest", help="for k8s: container image with megatoken in it")
    p.usage = "megatoken launch ENGINE RECIPE [--nodes N] [--nproc N] [--write FILE] ... [section.field=value ...]"


def _add_export(add: Callable[..., Parser]) -> None:
    p = add("export", "write a model in the form of another program, and prove it equal")
    p.add_argument("model", metavar="RUN_OR_CHECKPOINT", help="run folder, checkpoint, or anything `sample` takes")
    p.add_argument("--to", choices=("hf", "llmc"), default="hf",
                   help="hf: for transformers, vLLM and llama.cpp; llmc: for llm.c (default hf)")  # fmt: skip
    p.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write; it must not exist")
    p.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="of the weights (default fp32)")


def _add_dryrun(add: Callable[..., Parser]) -> None:
    p = add(
        "dryrun", "say what one GPU of many would hold and send, without any: the real model and sharding on no data"
    )
    p.usage = (
        "megatoken dryrun PRESET_OR_RECIPE --gpus N [--tp N] [--shard KIND] [--gpu NAME] ... [section.field=value ...]"
    )
    p.add_argument("preset", metavar="PRESET_OR_RECIPE", help=f"{', '.join(PRESETS)}, or a recipe")
    p.add_argument("--gpus", type=int, default=1, help="processes, one a GPU (default 1)")
    p.add_argument("--tp", type=int, help="the same as machine.tensor_parallel=...")
    p.add_argument("--shard", help="the same as machine.shard=...")
    p.add_argument(
        "--gpu", default="h100", help="whose memory it has to fit in: a name or a number of GB (default h100)"
    )


def _add_sample(add: Callable[..., Parser]) -> None:
    p = add("sample", "let a trained model continue a prompt")
    p.add_argument("model", metavar="MODEL",
                   help="run folder, Hugging Face folder or hub name, llm.c's .bin, nanoGPT's ckpt.pt")  # fmt: skip
    p.add_argument("prompt", metavar="PROMPT", nargs="?", default="-", help="text to continue; - or nothing: stdin")
    p.add_argument("--tokens", type=int, help="new tokens per sequence (default 128, or what the context has room for)")
    p.add_argument("--temperature", type=float, default=0.8, help="0: greedy (default 0.8)")
    p.add_argument("--top-k", type=int, default=50, help="draw from the k likeliest; 0: all (default 50)")
    p.add_argument("--top-p", type=float, default=1.0, help="draw from the likeliest that sum to p (default 1)")
    p.add_argument("--seed", type=int, default=0, help="same seed, same text (default 0)")
    p.add_argument("-n", "--n", type=int, default=1, help="sequences (default 1)")
    p.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps (default auto)")
    p.add_argument("--precision", default="fp32", choices=("auto", "fp32", "bf16", "fp16"), help="default fp32")


def _add_eval(add: Callable[..., Parser]) -> None:
    p = add("eval", "score a model in tasks, or its loss on any shards or text (docs/evaluation.md)")
    p.add_argument("model", metavar="MODEL", help="run folder, checkpoint, or anything else that `sample` takes")
    p.add_argument("--tasks", metavar="NAMES", help=f"a list such as hellaswag,piqa of {', '.join(TASKS)}")
    p.add_argument("--data", type=Path, metavar="PATH", help="with --tasks: their examples (.jsonl, .json, .parquet), "
                   "a file, or a folder with TASK.jsonl (default: the Hugging Face hub); alone: shards, or text of any "
                   "form that `megatoken prepare` reads")  # fmt: skip
    p.add_argument("--limit", type=int, default=0, metavar="N", help="first N examples of a task, or tokens; 0: all")
    p.add_argument("--split", choices=("train", "val"), help="of shards (default val where there is one)")
    p.add_argument("--examples", action="store_true", help="also what was chosen in each example, in the file's order")
    p.add_argument("--no-token-mean", action="store_true", help="leave out acc_token_mean: half the time of HellaSwag")
    p.add_argument("--nproc", type=int, default=1, metavar="N", help="processes on this machine (default 1)")
    p.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps (default auto)")
    p.add_argument("--precision", default="fp32", choices=("auto", "fp32", "bf16", "fp16"), help="default fp32")
    p.add_argument("--harness", action="store_true", help="let lm-evaluation-harness ask: any task that it knows")
    p.add_argument("--include", type=Path, metavar="DIR", help="with --harness: a folder of your own task files")
    p.add_argument("--fewshot", type=int, metavar="K", help="with --harness: solved examples before each question")


def check_eval(options: argparse.Namespace) -> None:
    """Raise Fault(CONFIG) for an option of `eval` that means nothing beside the others."""
    if options.limit < 0:
        raise Fault(Exit.CONFIG, f"--limit is {options.limit}", "megatoken eval", "give a number, or 0 for all")
    for flag, given, meant, for_what in (
        ("--split", options.split, not options.tasks, "--data without --tasks"),
        ("--examples", options.examples, options.tasks and not options.harness, "--tasks"),
        ("--fewshot", options.fewshot is not None, options.harness, "--harness"),
        ("--include", options.include, options.harness, "--harness"),
    ):
        if given and not meant:
            raise Fault(Exit.CONFIG, f"{flag} has no effect here", flag, f"leave it out: it is for {for_what}")


def describe_fields() -> str:
    """The help page of every field: key, default, unit and meaning, section by section."""
    lines, section = ["fields (section.field=value), as in a recipe:"], None
    for key, knob in KNOBS.items():
        head = key.rpartition(".")[0]
        if head and head != section:
            section = head
            lines.append(f"\n {section} ({'science: fixes the curve' if head in SCIENCE else 'machine'})")
        unit = f" [{knob.unit}]" if knob.unit else ""
        choices = f" {{{knob.expects.removeprefix('one of ')}}}" if knob.expects.startswith("one of") else ""
        lines.append(f"  {key + '=' + format_value(knob.default):<28} {knob.doc}{unit}{choices}")
    return "\n".join(lines)
