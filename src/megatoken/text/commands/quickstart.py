"""`megatoken quickstart`: prepare text, train a small GPT on it, evaluate it and sample from it.

Each command is printed before it runs. If quickstart is run again, it skips finished commands.
"""

import re
import shlex
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatoken.base.config.load import prepare_arguments, resolve
from megatoken.base.config.schema import flatten
from megatoken.base.console import Console, format_quantity
from megatoken.base.errors import ConfigError
from megatoken.cli import Data, Result, run_parsed
from megatoken.cli.arguments import parse
from megatoken.text.commands.prepare import name_program

if TYPE_CHECKING:
    from megatoken.data.dataset import Dataset

HELP = "train a small GPT on this machine's Python files or your text, and sample from it"
EXAMPLE = "megatoken quickstart"
RECIPE = "quickstart"
EVAL_TOKENS = 250_000  # limit; the default corpus holds out fewer
XZ_TOKENS = 3_000_000  # of training text for xz, at most: seconds, and fewer bytes than it holds
SAMPLES = 3


def run(options: Namespace, console: Console) -> Result | Data:
    """Run `prepare`, `train`, `eval` and `sample`.

    The result has the exit code of `train`. Its data holds the data of each command, by the name of
    the command. The key `compressors` holds what `measure_xz` returns.
    """
    from megatoken.data.dataset import load_dataset
    from megatoken.data.shard_format import MANIFEST_NAME

    overrides = list(options.overrides)
    source = options.data
    if source == "":
        raise ConfigError("--data is empty", "--data", "name a text, or leave it out")
    name = RECIPE
    if source is not None:
        name = re.sub(r"[^\w.-]+", "-", Path(source).stem).strip("-.") or "mine"
    out = str(options.out or Path("runs") / name)
    results = dict[str, Any]()
    is_dataset = source is not None and (Path(source) / MANIFEST_NAME).is_file()
    if source is not None:
        overrides.insert(0, f"data.path={source if is_dataset else Path('data') / name}")
    config = resolve(RECIPE, overrides).config
    settings = flatten(config)
    data = config.data.path
    # A prepared default corpus is used as is, even if another Python version made it.
    if not is_dataset and (source is not None or not (Path(data) / MANIFEST_NAME).is_file()):
        _, default, *arguments = prepare_arguments(resolve(RECIPE).config.data.path, data)
        run_step(["prepare", source or default, *arguments], options, console, results)
    dataset = load_dataset(data)
    prompt = options.prompt
    if prompt is None:
        is_set = source is None or any(each.startswith("sample.prompt=") for each in overrides)
        prompt = settings["sample.prompt"] if is_set else find_prompt(dataset)
    if settings["sample.every"].value and prompt != settings["sample.prompt"]:
        overrides.insert(0, f"sample.prompt={prompt}")
    code = run_step(["train", RECIPE, "--out", out, *overrides], options, console, results)
    if code:
        return Result(code, results)
    if len(dataset.val) > 1:
        limit = ["--limit", str(EVAL_TOKENS)] if len(dataset.val) > EVAL_TOKENS else []
        arguments = ["eval", out, "--data", data, "--split", "val", *limit]
        run_step(arguments, options, console, results)
        results["compressors"] = measure_xz(dataset, config.model.seq_len)
    run_step(["sample", out, prompt, "-n", str(SAMPLES)], options, console, results)
    console.print("")
    console.table(describe_end(out, results, prompt if source else "class", source is not None))
    return results


def run_step(
    arguments: list[str], parent: Namespace, console: Console, results: dict[str, Any]
) -> int:
    """Run another command, store its --json data in `results`, and return its exit code.

    arguments: its command line. parent: options of this command.
    """
    console.print(f"\n$ megatoken {shlex.join(arguments)}")
    options = parse(arguments)
    options.json = parent.json
    result = run_parsed(options, console)
    results[arguments[0]] = result.data
    return result.exit_code


def find_prompt(dataset: "Dataset") -> str:
    """Return up to three words from the start of the held-out text, or else the training text.

    The first word contains a letter. No space follows the last word, because tokens begin with the
    space before a word.
    """
    from megatoken.text.tokenizer import open_tokenizer

    tokens = dataset.val if len(dataset.val) else dataset.train
    ids = tokens.read(0, min(32, len(tokens))).tolist()
    tokenizer = open_tokenizer(dataset.vocabulary)
    document = tokenizer.decode([*takewhile(lambda id: id != tokenizer.eot, ids)])
    words = re.search(r"\S*\w\S*(?:[ \t]+\S+){0,2}", document)
    return words[0] if words else document.strip()


def measure_xz(dataset: "Dataset", seq_len: int) -> dict[str, float]:
    """Return the bits per byte of xz -9 on the text that `eval` uses, after the training text.

    The training text makes the comparison fair, because the model has seen it, too. xz gets the
    last `training_bytes` of it. Returns {} if Python has no lzma.
    """
    from megatoken.data.dataloader import evaluation_windows
    from megatoken.text.tokenizer import open_tokenizer

    try:
        import lzma
    except ImportError:
        return {}
    n_train = min(len(dataset.train), XZ_TOKENS)
    train_ids = dataset.train.read(len(dataset.train) - n_train, n_train)
    val_ids = dataset.val.read(1, len(dataset.val) - 1)
    if len(dataset.val) > EVAL_TOKENS:
        windows = evaluation_windows(dataset.val, seq_len=seq_len, limit_tokens=EVAL_TOKENS)
        val_ids = windows.rows(0, len(windows))[:, 1:].reshape(-1)
    tokenizer = open_tokenizer(dataset.vocabulary)
    train, val = (
        tokenizer.decode(ids[ids != tokenizer.eot]).encode() for ids in (train_ids, val_ids)
    )
    with ThreadPoolExecutor(2) as pool:  # preset 7: -9 with a dictionary of 16 MiB
        both, alone = pool.map(
            lambda text: len(lzma.compress(text, preset=7)), (train + val, train)
        )
    return {"xz -9": 8 * (both - alone) / len(val), "training_bytes": len(train)}


def describe_end(
    out: str, results: dict[str, Any], prompt: str, has_source: bool
) -> list[tuple[str, str]]:
    """Return (name, value) rows to print: the results, how good they are, and what to run next."""
    program = name_program()
    rows = [("run folder", out)]
    if "eval" in results:
        text = f"{results['eval']['bits_per_byte']:.3f} bits per byte"
        if xz := results["compressors"]:
            size = format_quantity(xz["training_bytes"])
            text += f"; xz -9 after {size}B of training text {xz['xz -9']:.3f}"
        rows.append(("held out", text))
    curves = Path(out) / "plots" / "curves.png"
    if curves.is_file():
        rows.append(("curves", str(curves)))
    rows.append(("next", f"{program} sample {shlex.join([out, prompt])}"))
    if not has_source:
        rows.append(("your text", f"{program} quickstart --data FOLDER_OR_FILE"))
    return rows
