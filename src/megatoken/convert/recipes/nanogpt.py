"""Translate nanoGPT's command line: `config/train_gpt2.py --batch_size=32`.

Source: train.py and configurator.py of karpathy/nanoGPT. Its config files are Python, which is
parsed and never run.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatoken.base.config.load import Assignment
from megatoken.base.errors import ConfigError
from megatoken.base.system.table import read_table
from megatoken.convert.recipes.translation import Translation, split_arguments, split_program

OPTION = "WORDS", "nanoGPT config file and --name=value flags, in quotes"
TABLE = read_table(__file__)


def translate(command: str, processes: int = 1) -> Translation:
    """Translate the arguments of nanoGPT's train.py: config files and --name=value.

    The command may include the launcher and train.py. Raises ConfigError, naming file:line, for
    what cannot be translated.
    """
    _, arguments = split_program(split_arguments(command, "--nanogpt"), "train.py")
    files = [Path(argument) for argument in arguments if not argument.startswith("--")]
    settings = [setting for argument in arguments for setting in _read(argument, TABLE["ignored"])]
    translation = Translation("nanoGPT", TABLE, settings)
    get = translation.get
    translation.name = f"nanogpt-{files[-1].stem if files else 'train'}"
    if get("init_from") == "resume":
        out = translation.out = translation.out or Path("out")
        if not (out / "checkpoints").is_dir():
            fix = f"start from nanoGPT's weights: model.init={out}/ckpt.pt"
            raise ConfigError(f"no run to resume in {out}", translation.where("init_from"), fix)
    _set_decay(translation)
    path = Path("data") / get("dataset")  # relative to nanoGPT's folder
    if files and not path.is_dir() and (files[-1].parent.parent / path).is_dir():
        path = files[-1].parent.parent / path
    translation.set("data.path", path, "dataset")
    return translation


def _set_decay(translation: Translation) -> None:
    """Translate the learning-rate decay. Raises ConfigError if it ends before the warm-up does."""
    get = translation.get
    if not get("decay_lr"):
        return
    keys = ("lr_decay_iters", "warmup_iters")
    decay_steps = get("lr_decay_iters") - get("warmup_iters")
    if decay_steps < 1 or not get("learning_rate"):
        what = "lr_decay_iters must exceed warmup_iters, and learning_rate 0"
        raise ConfigError(what, translation.where(*keys), "or set --decay_lr=False")
    ratio = round(get("min_lr") / get("learning_rate"), 12)
    translation.set("optim.min_lr_ratio", ratio, "min_lr", "learning_rate")
    if get("lr_decay_iters") != get("max_iters"):
        translation.set("optim.decay", f"{decay_steps}steps", *keys)


def _read(argument: str, ignored: list[str]) -> Iterator[Assignment]:
    """Yield the settings in an argument: --name=value, or a config file, which is not executed."""
    if argument.startswith("--"):
        name, equals, text = argument[2:].partition("=")
        if not equals:
            raise ConfigError(f"{argument!r} is not --name=value", "--nanogpt")
        yield Assignment(name, text.strip("'\""), f"nanoGPT {argument:.80}")
        return
    try:
        body = ast.parse(Path(argument).read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"cannot read it as Python: {error}", argument) from None
    for node in body:
        match node:
            case ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant()):
                continue
            case ast.Assign(targets=[ast.Name(name)], value=value) if name in ignored:
                text_value = ""
            case ast.Assign(targets=[ast.Name(name)], value=value):
                text_value = _evaluate(value, f"{argument}:{node.lineno}")
            case _:
                what = "not an assignment; config files are not run"
                raise ConfigError(what, f"{argument}:{node.lineno}")
        yield Assignment(name, text_value, f"{argument}:{node.lineno}")


def _evaluate(node: ast.expr, where: str) -> str:
    """Return the value of a literal or a product such as `5 * 8` as text. Raises ConfigError."""

    def evaluate(node: ast.expr) -> Any:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            return float(evaluate(node.left)) * float(evaluate(node.right))
        return ast.literal_eval(node)

    try:
        return str(evaluate(node))
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise ConfigError("not a literal value; config files are not run", where) from None
