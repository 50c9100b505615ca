"""nanoGPT's configuration files told as a recipe: `config/train_gpt2.py --batch_size=32`.

Source: train.py and configurator.py of karpathy/nanoGPT, whose defaults hold here for names that are not given. Its
configuration files are Python programs; they are parsed and never run: a value must be a constant, or arithmetic of
constants and of names before it. Absent: ckpt.pt (nanogpt_checkpoint.py).
"""

import ast
import difflib
import math
import operator
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatoken.errors import Exit, Fault
from megatoken.interop.translation import Translation, write_number

DEFAULTS: dict[str, Any] = {
    "out_dir": "out",
    "eval_interval": 2000,
    "log_interval": 1,
    "eval_iters": 200,
    "eval_only": False,
    "always_save_checkpoint": True,
    "init_from": "scratch",
    "wandb_log": False,
    "wandb_project": "owt",
    "wandb_run_name": "gpt2",
    "dataset": "openwebtext",
    "gradient_accumulation_steps": 40,
    "batch_size": 12,
    "block_size": 1024,
    "n_layer": 12,
    "n_head": 12,
    "n_embd": 768,
    "dropout": 0.0,
    "bias": False,
    "learning_rate": 6e-4,
    "max_iters": 600000,
    "weight_decay": 1e-1,
    "beta1": 0.9,
    "beta2": 0.95,
    "grad_clip": 1.0,
    "decay_lr": True,
    "warmup_iters": 2000,
    "lr_decay_iters": 600000,
    "min_lr": 6e-5,
    "backend": "nccl",
    "device": "cuda",
    "dtype": "",  # what the card can do
    "compile": True,
}
SILENT = ("wandb_log", "wandb_project", "wandb_run_name", "backend")
PUBLISHED = {
    "gpt2": (12, 12, 768),
    "gpt2-medium": (24, 16, 1024),
    "gpt2-large": (36, 20, 1280),
    "gpt2-xl": (48, 25, 1600),
}
ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


@dataclass(frozen=True, slots=True)
class Given:
    """A value of the configuration and where it was written."""

    value: Any
    where: str


class _Unreadable(ValueError):
    """An expression that would have to be run."""


class Config:
    """Every value, given or nanoGPT's own."""

    def __init__(self, given: Mapping[str, Given], file: Path | None) -> None:
        self._given = given
        self.file = file

    def given(self, name: str) -> bool:
        return name in self._given

    def where(self, *names: str) -> str:
        """Where the names were written, or that they were not."""
        return ", ".join(self._given[n].where if n in self._given else f"nanoGPT's {n}" for n in names)

    def get(self, name: str) -> Any:
        """The value. Raises Fault(CONFIG) when it is of another kind than nanoGPT's own."""
        value, default = self._given[name].value if name in self._given else DEFAULTS[name], DEFAULTS[name]
        kinds = (int, float) if isinstance(default, float) else (type(default),)
        if type(value) not in kinds or (float in kinds and not math.isfinite(value)):
            what = f"{name} is {value!r}, nanoGPT wants {'a number' if float in kinds else kinds[0].__name__}"
            raise Fault(Exit.CONFIG, what, self.where(name), f"its own value is {default!r}")
        return value


def translate_nanogpt(command: str) -> Translation:
    """The recipe of nanoGPT's `train.py` with these words behind it: files and --name=value, later ones win.

    Raises Fault(CONFIG) naming file:line for what nanoGPT would refuse, and for what cannot be told here.
    """
    config = _read_words(command)
    told = Translation(name=f"nanogpt-{config.file.stem if config.file else 'train'}")
    if config.given("out_dir"):  # its default, `out`, may hold a ckpt.pt already
        told.out = Path(config.get("out_dir"))
    if config.get("eval_only"):
        raise Fault(Exit.CONFIG, "eval_only trains nothing", config.where("eval_only"), "use megatoken eval")
    _tell_model(config, told)
    _tell_data(config, told)
    _tell_optimizer(config, told)
    _tell_schedules(config, told)
    _tell_machine(config, told)
    return told


def _read_words(command: str) -> Config:
    try:
        words = shlex.split(command.replace("\\\n", " "))
    except ValueError as wrong:
        raise Fault(Exit.CONFIG, f"cannot read the words: {wrong}", "--nanogpt", "check the quotes") from None
    given: dict[str, Given] = {}
    file = None
    for word in words:
        if not word.startswith("--"):
            file = Path(word)
            _read_file(file, given)
            continue
        key, equals, text = word[2:].partition("=")
        if not equals:
            raise Fault(Exit.CONFIG, f"cannot read {word!r}", "--nanogpt", "write --name=value")
        _check_name(key, word)
        try:
            value = ast.literal_eval(text)
        except (SyntaxError, ValueError):
            value = text  # nanoGPT takes what is no literal as a word, too
        given[key] = Given(value, f"nanoGPT {word}")
    return Config(given, file)


def _read_file(path: Path, given: dict[str, Given]) -> None:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Fault(Exit.CONFIG, f"cannot read it: {error.strerror}", str(path), "give nanoGPT's config file") from None
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        raise Fault(Exit.CONFIG, f"not Python: {error}", f"{path}:{line}", "give nanoGPT's config file") from None
    for node in tree.body:
        where = f"{path}:{node.lineno}"
        if isinstance(node, ast.Import | ast.ImportFrom) or _is_text(node):
            continue  # harmless: nothing of it is run
        if not isinstance(node, ast.Assign) or len(node.targets) != 1 or not isinstance(node.targets[0], ast.Name):
            raise Fault(Exit.CONFIG, "not an assignment", where, "a config file is read, never run: write name = value")
        name = node.targets[0].id
        _check_name(name, where)
        try:
            value = _evaluate(node.value, given)
        except _Unreadable:
            if name not in SILENT:
                what = f"{name} would have to be computed by running the file"
                raise Fault(Exit.CONFIG, what, where, "write the value out") from None
            value = DEFAULTS[name]
        given[name] = Given(value, where)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _check_name(name: str, where: str) -> None:
    if name not in DEFAULTS:
        near = difflib.get_close_matches(name, DEFAULTS, n=1, cutoff=0.0)[0]
        raise Fault(Exit.CONFIG, f"nanoGPT has no {name}", where, f"did you mean {near}?")


def _evaluate(node: ast.expr, given: Mapping[str, Given]) -> Any:
    """The value of constants, earlier names, and + - * / // of numbers. Raises _Unreadable for anything else."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name) and node.id in given:
        return given[node.id].value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        operand = _evaluate(node.operand, given)
        if isinstance(operand, int | float):
            return -operand
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        left, right = _evaluate(node.left, given), _evaluate(node.right, given)
        if isinstance(left, int | float) and isinstance(right, int | float):
            try:
                return ARITHMETIC[type(node.op)](left, right)
            except ArithmeticError:
                raise _Unreadable from None
    raise _Unreadable


def _tell_model(config: Config, told: Translation) -> None:
    init = config.get("init_from")
    if init in PUBLISHED:
        told.set("model.init", f"openai-community/{init}", config.where("init_from"))
        for key, size in zip(("n_layer", "n_head", "d_model"), PUBLISHED[init], strict=True):
            told.set(f"model.{key}", size, config.where("init_from"))
        told.set("model.mlp", "gelu", "OpenAI's weights")
        told.set("model.bias", "true", "OpenAI's weights")
        told.note("OpenAI's weights go on with the tanh GELU they were trained with; nanoGPT computes the exact one")
    elif init in ("scratch", "resume"):
        for key, theirs in (("n_layer", "n_layer"), ("n_head", "n_head"), ("d_model", "n_embd")):
            told.set(f"model.{key}", config.get(theirs), config.where(theirs))
        told.set("model.mlp", "gelu-erf", "nanoGPT: fixed")
        told.set("model.bias", "true" if config.get("bias") else "false", config.where("bias"))
    else:
        fix = f"nanoGPT has scratch, resume, {', '.join(PUBLISHED)}"
        raise Fault(Exit.CONFIG, f"no init_from called {init!r}", config.where("init_from"), fix)
    told.set("model.seq_len", config.get("block_size"), config.where("block_size"))
    told.set("model.dropout", write_number(config.get("dropout")), config.where("dropout"))


def _tell_data(config: Config, told: Translation) -> None:
    path = Path("data") / config.get("dataset")  # as nanoGPT has it: seen from its own folder
    if config.file and not path.is_dir() and (beside := config.file.parent.parent / path).is_dir():
        path = beside
    told.set("data.path", path, config.where("dataset"))
    told.note("batches are drawn without replacement, each window once an epoch; nanoGPT draws random places")


def _tell_optimizer(config: Config, told: Translation) -> None:
    told.set("optim.lr", write_number(config.get("learning_rate")), config.where("learning_rate"))
    if config.get("decay_lr"):
        steps, decay = config.get("max_iters"), config.get("lr_decay_iters")
        if steps != decay:
            what = f"the rate decays over {decay} of {steps} iterations, here it always decays to the end"
            fix = f"add --lr_decay_iters={steps}, or --max_iters={decay}"
            raise Fault(Exit.CONFIG, what, config.where("max_iters", "lr_decay_iters"), fix)
        told.set("optim.schedule", "cosine", config.where("decay_lr"))
        told.set("optim.warmup", f"{config.get('warmup_iters')}steps", config.where("warmup_iters"))
        floor = config.get("min_lr") / config.get("learning_rate")
        told.set("optim.floor", write_number(round(floor, 12)), config.where("min_lr", "learning_rate"))
    else:
        told.set("optim.schedule", "constant", config.where("decay_lr"))
        told.set("optim.warmup", "0steps", config.where("decay_lr"))
    for ours, theirs in (
        ("beta1", "beta1"),
        ("beta2", "beta2"),
        ("weight_decay", "weight_decay"),
        ("clip", "grad_clip"),
    ):
        told.set(f"optim.{ours}", write_number(config.get(theirs)), config.where(theirs))
    told.set("optim.eps", "1e-8", "nanoGPT: torch's AdamW")
    told.set("budget.steps", config.get("max_iters"), config.where("max_iters"))
    told.note("nanoGPT takes one step more than max_iters, and its warm-up divides by one more than warmup_iters")
    factors = ("gradient_accumulation_steps", "batch_size", "block_size")
    batch = config.get(factors[0]) * config.get(factors[1]) * config.get(factors[2])
    told.set("budget.batch_tokens", batch, config.where(*factors))
    told.set("seed", 1337, "nanoGPT: fixed")


def _tell_schedules(config: Config, told: Translation) -> None:
    every, where = config.get("eval_interval"), config.where("eval_interval")
    told.set("evaluate.every", f"{every}steps", where)
    tokens = config.get("eval_iters") * config.get("batch_size") * config.get("block_size")
    told.set("evaluate.tokens", tokens, config.where("eval_iters", "batch_size", "block_size"))
    told.set("save.every", f"{every}steps", where)
    told.set("save.keep_last", 1, "nanoGPT keeps one")
    told.set("sample.every", "0steps", "nanoGPT: never while it trains")
    told.set("log.every", f"{config.get('log_interval')}steps", config.where("log_interval"))
    if not config.get("always_save_checkpoint"):
        told.note("the newest checkpoint is kept, whether or not its validation loss is the best so far")


def _tell_machine(config: Config, told: Translation) -> None:
    told.set("machine.micro_batch", config.get("batch_size"), config.where("batch_size"))
    if config.given("device"):
        told.set("machine.device", config.get("device"), config.where("device"))
    if config.given("dtype"):
        words = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
        word = words.get(config.get("dtype"))
        if word is None:
            raise Fault(Exit.CONFIG, f"no dtype {config.get('dtype')!r}", config.where("dtype"), ", ".join(words))
        told.set("machine.precision", word, config.where("dtype"))
    if config.given("compile"):
        told.set("machine.compile", "on" if config.get("compile") else "off", config.where("compile"))
    if left := [name for name in SILENT if config.given(name)]:
        told.note(f"left out, they change nothing that is learnt: {', '.join(left)}")
