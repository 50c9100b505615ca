"""The command line: one function per subcommand, each a few lines around one call.

Arguments and recipes are checked before anything heavy is imported: a typo costs a tenth of a second, so modules that
import torch are imported inside their command (tests/test_architecture.py lists them).
"""

import argparse
import dataclasses
import json
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatoken import __version__
from megatoken.bench.options import add_benches
from megatoken.config import KNOBS, SCIENCE
from megatoken.console import Console
from megatoken.errors import Exit, Fault
from megatoken.hardware import prepare_process
from megatoken.model import count
from megatoken.presets import GPT2_VOCABULARY, PRESETS, Shape
from megatoken.recipe import format_value, list_recipes, render, resolve, resolve_preset

OVERRIDE = re.compile(r"[A-Za-z_][\w.]*=.*", re.DOTALL)


class Parser(argparse.ArgumentParser):
    """argparse, with errors in our words."""

    def error(self, message: str) -> NoReturn:
        raise Fault(Exit.CONFIG, message, self.prog, f"see `{self.prog} --help`")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    prepare_process()
    try:
        options = parse(words)
        code, answer = options.call(options)
        if options.json:
            print(json.dumps(answer), flush=True)
        return int(code)
    except Fault as fault:
        if "--debug" in words:
            traceback.print_exc()
        print(f"error: {fault}", file=sys.stderr)
        return int(fault.code)
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def parse(words: list[str]) -> argparse.Namespace:
    """Options of one command; for those that take a recipe, `a.b=c` words may stand anywhere."""
    overrides: list[str] = []
    if words and words[0] in ("train", "config", "describe"):
        takes_value = {word for word in words if word in ("--out", "--init")}
        kept: list[str] = []
        for previous, word in zip(["", *words], words, strict=False):
            is_override = OVERRIDE.fullmatch(word) and previous not in takes_value
            (overrides if is_override else kept).append(word)
        words = kept
    options = build_parser().parse_args(words)
    options.overrides = overrides
    return options


def build_parser() -> Parser:
    """Every subcommand and option."""
    parser = Parser(prog="megatoken", description="Pre-train GPTs from raw text: prepare, train, sample.")
    parser.add_argument("--version", action="version", version=f"megatoken {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)

    def add(name: str, call: Any, doc: str, epilog: str = "", among: Any = commands) -> Parser:
        raw = argparse.RawDescriptionHelpFormatter
        command: Parser = among.add_parser(name, help=doc, description=doc, epilog=epilog, formatter_class=raw)
        command.add_argument("--json", action="store_true", help="progress to stderr, one JSON line to stdout")
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
        command.set_defaults(call=call)
        return command

    recipe_doc = f"a .yaml file, or one of ours: {', '.join(list_recipes())}"
    p = add("prepare", run_prepare, "turn text into shards of tokens")
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
    p = add("train", run_train, "train a recipe, or go on with it", epilog=describe_fields())
    p.add_argument("recipe", metavar="RECIPE", help=recipe_doc)
    p.add_argument("--out", type=Path, help="run folder (default runs/RECIPE)")
    p.add_argument("--init", metavar="RUN_OR_HF_DIR", help="start from these weights; the same as model.init=...")
    p.add_argument("--explain", action="store_true", help="say what was measured for every choice left to auto")
    p.usage = ("megatoken train RECIPE [--out RUN] [--init RUN_OR_HF_DIR] [--explain] [--json] [--debug] "
               "[section.field=value ...]")  # fmt: skip
    p = add("config", run_config, "print the resolved values of a recipe and where each comes from")
    p.usage = "megatoken config RECIPE [--json] [--debug] [section.field=value ...]"
    p.add_argument("recipe", metavar="RECIPE", help=recipe_doc)
    p = add("describe", run_describe, "parameters, FLOPs and memory of a preset or recipe")
    p.usage = "megatoken describe PRESET_OR_RECIPE [--json] [--debug] [section.field=value ...]"
    p.add_argument("preset", metavar="PRESET_OR_RECIPE", help=f"{', '.join(PRESETS)}, or a recipe")
    _add_sample(add)
    p = commands.add_parser("bench", help="measure this machine: a ladder of speed-ups, and each part alone")
    benches = p.add_subparsers(dest="bench", required=True, metavar="BENCH", parser_class=Parser)
    add_benches(lambda name, doc: add(name, run_bench, doc, among=benches))
    p = add("verify", run_verify, "check every hash of a dataset or run folder")
    p.add_argument("folder", metavar="DIR", type=Path)
    p = add("plot", run_plot, "draw the curves of one or several runs into one picture")
    p.add_argument("runs", metavar="RUN", nargs="+", type=Path)
    p.add_argument("--out", type=Path, help="PNG to write (default RUN/plots/curves.png of the first)")
    p.add_argument("--pictures", action="store_true", help="also position embeddings and a weight matrix of the first")
    return parser


def _add_sample(add: Callable[..., Parser]) -> None:
    p = add("sample", run_sample, "let a trained model continue a prompt")
    p.add_argument("model", metavar="RUN_OR_HF_DIR", help="run folder, Hugging Face GPT-2 folder or hub name")
    p.add_argument("prompt", metavar="PROMPT", nargs="?", default="-", help="text to continue; - or nothing: stdin")
    p.add_argument("--tokens", type=int, help="new tokens per sequence (default 128, or what the context has room for)")
    p.add_argument("--temperature", type=float, default=0.8, help="0: greedy (default 0.8)")
    p.add_argument("--top-k", type=int, default=50, help="draw from the k likeliest; 0: all (default 50)")
    p.add_argument("--top-p", type=float, default=1.0, help="draw from the likeliest that sum to p (default 1)")
    p.add_argument("--seed", type=int, default=0, help="same seed, same text (default 0)")
    p.add_argument("-n", "--n", type=int, default=1, help="sequences (default 1)")
    p.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps (default auto)")
    p.add_argument("--precision", default="fp32", choices=("auto", "fp32", "bf16", "fp16"), help="default fp32")


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


def run_prepare(options: argparse.Namespace) -> tuple[Exit, dict[str, Any]]:
    """prepare: text to shards."""
    from megatoken.data.prepare import prepare
    from megatoken.progress import PrepareBar

    with PrepareBar(to_stderr=options.json) as bar:
        done = prepare(
            options.source,
            options.out,
            tokenizer=options.tokenizer,
            workers=options.workers,
            val_fraction=options.val_fraction,
            shard_tokens=options.shard_tokens,
            invalid=options.invalid,
            text_key=options.text_key,
            root=options.root,
            on_progress=bar.update,
        )
    bar.finish(options.out, done)
    return Exit.DONE, dataclasses.asdict(done)


def run_train(options: argparse.Namespace) -> tuple[Exit, dict[str, Any]]:
    """train: a recipe to a run folder."""
    given = [f"model.init={options.init}"] if options.init else []
    resolved = resolve(options.recipe, [*options.overrides, *given])
    from megatoken.pretrain import pretrain

    out = options.out or Path("runs") / resolved.name
    summary = pretrain(resolved, out, Console(to_stderr=options.json), explain=options.explain)
    answer = dataclasses.asdict(summary)
    return summary.code, answer


def run_config(options: argparse.Namespace) -> tuple[Exit, dict[str, Any]]:
    """config: the resolved recipe."""
    resolved = resolve(options.recipe, options.overrides)
    text = render(resolved.run, resolved.origins)
    if not options.json:
        print(text, end="")
    return Exit.DONE, {"values": dataclasses.asdict(resolved.run), "origins": resolved.origins}


def run_describe(options: argparse.Namespace) -> tuple[Exit, dict[str, Any]]:
    """describe: arithmetic about a shape."""
    if options.preset in PRESETS:
        model = resolve_preset(options.preset, options.overrides)
    else:
        model = resolve(options.preset, options.overrides).run.model
    shape, assumed = model.shape(GPT2_VOCABULARY), not model.vocab_size
    answer = {
        "parameters": count.count_parameters(shape),
        "matmul_parameters": count.count_matmul_parameters(shape),
        "flops_per_token_full": count.flops_per_token(shape, causal=False),
        "flops_per_token_causal": count.flops_per_token(shape, causal=True),
        "state_bytes": count.state_bytes(shape),
        "expected_initial_loss": count.expected_initial_loss(shape),
        **dataclasses.asdict(shape),
    }
    if not options.json:
        _print_shape(options.preset, shape, answer, assumed)
    return Exit.DONE, answer


def _print_shape(name: str, shape: Shape, answer: dict[str, Any], assumed: bool) -> None:
    note = " (the recipe leaves it to the tokenizer: GPT-2's assumed)" if assumed else ""
    Console().table(
        [
            ("model", f"{name}: {shape.n_layer} layers, {shape.n_head} heads of {shape.d_head}, width {shape.d_model}"),
            ("context", f"{shape.seq_len:,} tokens"),
            ("vocabulary", f"{shape.vocab_size:,} ids, padded to {shape.padded_vocab_size:,}{note}"),
            ("parameters", f"{answer['parameters']:,}"),
            ("in products", f"{answer['matmul_parameters']:,} (the tied output layer counted once)"),
            ("FLOPs/token", f"{answer['flops_per_token_full']:,} full attention, "
                            f"{answer['flops_per_token_causal']:,} causal"),
            ("state", f"{answer['state_bytes'] / 2**30:.2f} GiB of fp32 weights and AdamW moments"),
            ("first loss", f"ln(V) = {answer['expected_initial_loss']:.3f} nats"),
        ]
    )  # fmt: skip


def run_sample(options: argparse.Namespace) -> tuple[Exit, dict[str, Any]]:
    """sample: a prompt continued."""
    from megatoken.writing import write_text

    prompt = sys.stdin.buffer.read() if options.prompt == "-" else options.prompt.encode(errors="surrogateescape")
    return Exit.DONE, write_text(options, prompt.decode(errors="replace"))


def run_bench(options: argparse.Namespace) -> tuple[Exit, dict[str, Any]]:
    """bench: one measurement; its JSON line comes last on stdout, asked for or not."""
    from megatoken.bench.program import measure

    answer = measure(options, Console(to_stderr=options.json))
    options.json = True
    return Exit.DONE, answer


def run_verify(options: argparse.Namespace) -> tuple[Exit, dict[str, Any]]:
    """verify: every hash of a folder."""
    from megatoken.verify import verify_folder

    report = verify_folder(options.folder)
    console = Console(to_stderr=options.json)
    for fault in report.faults:
        console.say(f"damaged: {fault}")
    console.say(f"{report.kind} {options.folder}: {report.checked} checked, {len(report.faults)} damaged")
    answer = {"kind": report.kind, "checked": report.checked, "damaged": [str(fault) for fault in report.faults]}
    return report.faults[0].code if report.faults else Exit.DONE, answer


def run_plot(options: argparse.Namespace) -> tuple[Exit, dict[str, Any]]:
    """plot: pictures of runs."""
    from megatoken.plot import draw_curves, draw_weights

    first: Path = options.runs[0]
    target = options.out or first / "plots"
    drawn = [draw_curves(options.runs, target / "curves.png" if target.is_dir() or not options.out else target)]
    if options.pictures:
        drawn += draw_weights(first, first / "plots")
    for path in drawn if not options.json else []:
        print(path)
    return Exit.DONE, {"pictures": [str(path) for path in drawn]}


if __name__ == "__main__":
    sys.exit(main())
