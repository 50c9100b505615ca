"""llm.c's command line told as a recipe: `-e d12 -b 64 -t 1024 -d 524288 ...`.

Source: train_gpt2.cu of karpathy/llm.c, whose flags are pairs of words and whose defaults hold here for flags that are
not given. Absent: running llm.c, its checkpoints (llmc_checkpoint.py).
"""

import difflib
import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path

from megatoken.data.shards import MANIFEST_NAME
from megatoken.errors import Exit, Fault
from megatoken.interop.llmc_header import read_checkpoint_header
from megatoken.interop.translation import Translation, write_number
from megatoken.presets import PRESETS

PROGRAMS = ("train_gpt2cu", "train_gpt2fp32cu", "train_gpt2")


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of llm.c: how its value is read, what holds when it is not given, and its meaning in words."""

    read: Callable[[str], int | float | str]
    default: int | float | str
    doc: str


FLAGS: dict[str, Flag] = {
    "-i": Flag(str, "dev/data/tinyshakespeare/tiny_shakespeare_train.bin", "training shards"),
    "-j": Flag(str, "dev/data/tinyshakespeare/tiny_shakespeare_val.bin", "validation shards"),
    "-e": Flag(str, "gpt2_124M_bf16.bin", "model: d12, gpt3:c768 or a checkpoint"),
    "-o": Flag(str, "", "output folder"),
    "-n": Flag(int, 0, "steps between checkpoints"),
    "-nk": Flag(int, 0, "checkpoints to keep, 0: all"),
    "-nm": Flag(int, 0, "steps between checkpoints that are never removed"),
    "-y": Flag(int, 0, "resume"),
    "-b": Flag(int, 4, "sequences per forward"),
    "-t": Flag(int, 1024, "sequence length"),
    "-d": Flag(int, -1, "tokens in a step"),
    "-x": Flag(int, -1, "steps, -1: one epoch"),
    "-k": Flag(str, "cosine", "learning-rate schedule"),
    "-l": Flag(float, 3e-4, "learning rate"),
    "-u": Flag(int, 0, "warm-up steps"),
    "-q": Flag(float, 1.0, "last learning rate as a share of the peak"),
    "-c": Flag(float, 0.0, "weight decay"),
    "-sl": Flag(float, 0.0, "skip updates of outlying loss"),
    "-sg": Flag(float, 0.0, "skip updates of outlying gradient norm"),
    "-v": Flag(int, 20, "steps between validations"),
    "-m": Flag(int, 20, "batches of a validation, -1: all"),
    "-s": Flag(int, 20, "steps between samples"),
    "-g": Flag(int, 64, "length of a sample"),
    "-h": Flag(int, 0, "HellaSwag"),
    "-a": Flag(int, 0, "overfit one batch"),
    "-f": Flag(int, 1, "TF32"),
    "-w": Flag(int, 1, "fp32 master weights"),
    "-ge": Flag(int, -1, "GELU fusion"),
    "-z": Flag(int, 0, "ZeRO stage"),
    "-r": Flag(int, 1, "recompute: 0 nothing, 1 GELU, 2 GELU and norms"),
    "-pn": Flag(int, 1, "processes"),
    "-pr": Flag(int, 0, "rank"),
    "-pg": Flag(int, 8, "GPUs of a node"),
    "-pm": Flag(str, "mpi", "how ranks meet"),
    "-pi": Flag(str, "mpi", "how ranks meet"),
    "-ps": Flag(str, "", "server's address"),
    "-pp": Flag(str, "", "shared file system"),
    "-pf": Flag(str, "", "shared file system"),
    "-lg": Flag(int, -1, "steps between looks at the GPU"),
}
HELLASWAG = Path("dev/data/hellaswag/hellaswag_val.jsonl")  # what llm.c's dev/data/hellaswag.py downloads
SILENT = ("-y", "-w", "-ge", "-lg", "-pr", "-pg", "-pm", "-pi", "-ps", "-pp", "-pf")  # nothing of it is learnt
# (layers -> width, heads) and (width -> layers, head width) of its descriptors; sequence lengths 1024 and 2048.
GPT2_DEPTHS = {
    6: (384, 6),
    12: (768, 12),
    24: (1024, 16),
    36: (1280, 20),
    48: (1600, 25),
    60: (1920, 30),
    72: (2880, 30),
    84: (3456, 36),
}
GPT3_WIDTHS = {
    384: (6, 64),
    768: (12, 64),
    1024: (24, 64),
    1536: (24, 96),
    2048: (24, 128),
    2560: (32, 80),
    4096: (32, 128),
    12288: (96, 128),
}


class Words:
    """The flags of one command: values read, each with the words it was written in."""

    def __init__(self, command: str) -> None:
        try:
            words = shlex.split(command.replace("\\\n", " "))
        except ValueError as wrong:
            raise Fault(Exit.CONFIG, f"cannot read the command: {wrong}", "--llmc", "check its quotes") from None
        self.processes = 0
        program = next((place for place, word in enumerate(words) if Path(word).name in PROGRAMS), None)
        if program is not None:
            launcher, words = words[:program], words[program + 1 :]
            counts = [after for flag, after in pairwise(launcher) if flag in ("-np", "-n")]
            self.processes = int(counts[0]) if counts and counts[0].isdigit() else 0
        self._given: dict[str, str] = {}
        for flag, value in zip(words[::2], [*words[1::2], None], strict=False):
            if flag not in FLAGS:
                raise Fault(Exit.CONFIG, f"llm.c has no flag {flag}", "--llmc", _suggest(flag))
            if value is None:
                raise Fault(Exit.CONFIG, f"{flag} has no value", "--llmc", f"{flag} is: {FLAGS[flag].doc}")
            self._given[flag] = value
        self.processes = self.processes or self.integer("-pn")

    def given(self, flag: str) -> bool:
        return flag in self._given

    def where(self, *flags: str) -> str:
        """The flags as written, or with their default."""
        said = [f"{f} {self._given[f]}" if f in self._given else f"{f} {FLAGS[f].default} (default)" for f in flags]
        return f"llm.c {' '.join(said)}"

    def text(self, flag: str) -> str:
        return self._given.get(flag, str(FLAGS[flag].default))

    def integer(self, flag: str) -> int:
        return int(self._read(flag))

    def number(self, flag: str) -> float:
        return float(self._read(flag))

    def _read(self, flag: str) -> int | float | str:
        try:
            value = FLAGS[flag].read(self.text(flag))
            if isinstance(value, str) or math.isfinite(value):
                return value
            raise ValueError
        except ValueError:
            kind = "a whole number" if FLAGS[flag].read is int else "a number"
            what = f"{flag} expects {kind} ({FLAGS[flag].doc}), got {self.text(flag)!r}"
            raise Fault(Exit.CONFIG, what, "--llmc", "correct it") from None


def _suggest(flag: str) -> str:
    begun = [known for known in FLAGS if flag.replace("--", "-").startswith(known)]
    near = max(begun, key=len) if begun else difflib.get_close_matches(flag, FLAGS, n=1, cutoff=0.0)[0]
    return f"did you mean {near} ({FLAGS[near].doc})? known: {' '.join(FLAGS)}"


def translate_llmc(command: str, processes: int = 1) -> Translation:
    """The recipe of a train_gpt2cu command, with or without the program and its mpirun before the flags.

    processes: how many run side by side, unless the command says so itself; the validation of llm.c takes so many
    batches at a time. Raises Fault(CONFIG) in one line for what llm.c would refuse, and for what cannot be told here.
    """
    words = Words(command)
    ranks = words.processes if words.processes > 1 else processes
    told = Translation(name=f"llmc-{Path(words.text('-e')).stem.replace(':', '-')}")
    told.out = Path(words.text("-o")) if words.text("-o") else None
    for flag, reason in {"-sl": "skipping outliers", "-sg": "skipping outliers", "-a": "overfitting a batch"}.items():
        if words.number(flag):
            raise Fault(Exit.CONFIG, f"{reason} is not offered here", words.where(flag), f"leave out {flag}")
    _tell_model(words, told)
    _tell_data(words, told)
    _tell_optimizer(words, told)
    _tell_budget(words, told, ranks)
    _tell_schedules(words, told, ranks)
    _tell_machine(words, told)
    return told


def _tell_model(words: Words, told: Translation) -> None:
    name, where = words.text("-e"), words.where("-e")
    if name.endswith(".bin"):
        header = read_checkpoint_header(Path(name))
        told.set("model.init", name, where)
        layers, heads, width, context = header.n_layer, header.n_head, header.d_model, header.seq_len
    elif name.removeprefix("gpt2:").startswith("d") and _number(name, "gpt2:d", "d") in GPT2_DEPTHS:
        layers, context = _number(name, "gpt2:d", "d"), 1024
        width, heads = GPT2_DEPTHS[layers]
    elif _number(name, "gpt3:c") in GPT3_WIDTHS:
        width, context = _number(name, "gpt3:c"), 2048
        layers, heads = GPT3_WIDTHS[width][0], width // GPT3_WIDTHS[width][1]
    else:
        known = [f"d{depth}" for depth in GPT2_DEPTHS] + [f"gpt3:c{width}" for width in GPT3_WIDTHS]
        raise Fault(Exit.CONFIG, f"no model called {name!r}", where, f"known: {' '.join(known)}, or a .bin file")
    sizes = (layers, heads, width)
    shaped = [k for k, s in PRESETS.items() if (s.n_layer, s.n_head, s.d_model) == sizes and s.seq_len == context]
    if shaped:
        told.set("model.preset", shaped[0], where)
    else:
        for key, size in zip(("n_layer", "n_head", "d_model"), sizes, strict=True):
            told.set(f"model.{key}", size, where)
    length = words.integer("-t")
    if length > context:
        what = f"sequences of {length} tokens for a model of {context} positions"
        raise Fault(Exit.CONFIG, what, words.where("-t"), f"set -t {context} or less")
    told.set("model.seq_len", length, words.where("-t"))
    if length < context:
        told.note(f"positions from {length} on, which llm.c keeps and never trains, do not exist here")


def _number(name: str, *prefixes: str) -> int:
    """The number behind one of the prefixes; 0 when there is none."""
    rest = next((name.removeprefix(prefix) for prefix in prefixes if name.startswith(prefix)), "")
    return int(rest) if rest.isdecimal() else 0


def _tell_data(words: Words, told: Translation) -> None:
    """One folder, or one pattern, that holds both splits: ours knows validation shards by `val` in their names."""
    train, val, where = words.text("-i"), words.text("-j"), words.where("-i", "-j")
    folder = Path(train).parent
    if Path(val).parent != folder:
        fix = f"link the validation shards into {folder}"
        raise Fault(Exit.CONFIG, "training and validation shards lie in two folders", where, fix)
    for name, is_val in ((Path(train).name, False), (Path(val).name, True)):
        if ("val" in name) != is_val:
            fix = "name validation shards with `val` in it, and no others: fineweb_val_000000.bin"
            raise Fault(Exit.CONFIG, f"{name} does not tell which split it is", where, fix)
    path = folder
    if not (folder / MANIFEST_NAME).exists():  # llm.c's own: exactly the files that the two patterns name
        patterns = (Path(train).name, Path(val).name)
        path = folder / _join_patterns(*patterns)
        for file in sorted(folder.glob(path.name)):
            if not any(fnmatch(file.name, pattern) for pattern in patterns):
                fix = "give the shards of a run a folder of their own"
                raise Fault(Exit.CONFIG, f"{path} would take in {file.name}, too", where, fix)
    told.set("data.path", path, where)
    told.note("data comes in another order: a shuffle of all windows instead of one within shards")


def _join_patterns(one: str, other: str) -> str:
    """The narrowest pattern of a common beginning and end that both names, or patterns, fit."""
    begin = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b or a in "*?["), len(one))
    shared = min(len(one), len(other)) - begin
    ends = zip(reversed(one), reversed(other), strict=False)
    end = next((i for i, (a, b) in enumerate(ends) if a != b or a in "*?]" or i == shared), shared)
    return f"{one[:begin]}*{one[len(one) - end :]}"


def _tell_optimizer(words: Words, told: Translation) -> None:
    kind, where = words.text("-k"), words.where("-k")
    kinds = {"cosine": "cosine", "linear": "linear", "constant": "constant", "wsd": "wsd-sqrt"}
    if kind not in kinds:
        raise Fault(Exit.CONFIG, f"no schedule called {kind!r}", where, f"llm.c has {', '.join(kinds)}")
    told.set("optim.lr", write_number(words.number("-l")), words.where("-l"))
    told.set("optim.schedule", kinds[kind], where)
    if kind == "constant":
        told.set("optim.warmup", "0steps", "llm.c: -k constant has no warm-up")
    else:
        told.set("optim.warmup", f"{words.integer('-u')}steps", words.where("-u"))
    if kind == "wsd":
        told.set("optim.decay", "0.2dur", "llm.c: -k wsd decays in the last fifth")
    told.set("optim.floor", write_number(words.number("-q")), words.where("-q"))
    told.set("optim.weight_decay", write_number(words.number("-c")), words.where("-c"))
    for key, value in (("beta1", 0.9), ("beta2", 0.95), ("eps", 1e-8), ("clip", 1.0)):
        told.set(f"optim.{key}", value, "llm.c: fixed")


def _tell_budget(words: Words, told: Translation, ranks: int) -> None:
    forward = words.integer("-b") * words.integer("-t") * ranks
    if forward <= 0:
        raise Fault(Exit.CONFIG, "a batch needs sequences and tokens", words.where("-b", "-t"), "give both")
    batch = words.integer("-d")
    if batch == -1:
        batch = forward
    if batch % forward:
        what = f"{batch} tokens a step are not a multiple of {forward}: -b x -t x {ranks} processes"
        raise Fault(Exit.CONFIG, what, words.where("-d", "-b", "-t"), f"set -d {max(batch // forward, 1) * forward}")
    told.set("budget.batch_tokens", batch, words.where("-d"))
    told.set("machine.micro_batch", words.integer("-b"), words.where("-b"))
    if words.integer("-x") == -1:
        told.set("budget.epochs", 1, words.where("-x"))
    else:
        told.set("budget.steps", words.integer("-x"), words.where("-x"))


def _tell_schedules(words: Words, told: Translation, ranks: int) -> None:
    told.set("evaluate.every", f"{words.integer('-v')}steps", words.where("-v"))
    batches = words.integer("-m")
    if batches == -1:
        told.set("evaluate.tokens", "1T", "llm.c -m -1: the whole split")
    else:
        tokens = batches * words.integer("-b") * words.integer("-t") * ranks
        said = f"{words.where('-m')}: {batches} x -b x -t x {ranks} processes"
        told.set("evaluate.tokens", tokens, said)
    if words.integer("-h"):
        told.set("evaluate.tasks", "hellaswag", words.where("-h"))
        told.set("evaluate.tasks_every", f"{words.integer('-v')}steps", words.where("-v"))
        if HELLASWAG.is_file():
            told.set("evaluate.tasks_data", HELLASWAG, "llm.c: fixed, before its own conversion to .bin")
    told.set("sample.every", f"{words.integer('-s')}steps", words.where("-s"))
    told.set("sample.tokens", max(words.integer("-g") - 1, 1), f"{words.where('-g')}: the first is <|endoftext|>")
    told.set("sample.temperature", 1, "llm.c: fixed")
    told.set("sample.top_k", 0, "llm.c: fixed")
    every, keep, major = words.integer("-n"), words.integer("-nk"), words.integer("-nm")
    told.set("save.every", f"{every}steps", words.where("-n"))
    if keep:
        told.set("save.keep_last", keep, words.where("-nk"))
        told.set("save.keep_every", f"{major}steps", words.where("-nm"))
    else:
        told.set("save.keep_every", f"{every}steps", f"{words.where('-nk')}: all")


def _tell_machine(words: Words, told: Translation) -> None:
    recompute = words.integer("-r")
    if recompute not in (0, 1, 2):
        raise Fault(Exit.CONFIG, f"-r is {recompute}", words.where("-r"), "0, 1 or 2")
    told.set("machine.recompute", "gelu" if recompute else "none", words.where("-r"))
    if words.given("-z"):
        stages = ("none", "zero1", "zero2", "zero3")
        if words.integer("-z") not in range(len(stages)):
            raise Fault(Exit.CONFIG, f"-z is {words.integer('-z')}", words.where("-z"), "0, 1, 2 or 3")
        told.set("machine.shard", stages[words.integer("-z")], words.where("-z"))
    if recompute == 2:
        told.note("norms are not computed again in the backward, only GELU is: more memory, same numbers")
    told.set("machine.tf32", "true" if words.integer("-f") else "false", words.where("-f"))
    if words.given("-w") and not words.integer("-w"):
        fix = "leave out -w 0: weights are always kept in fp32"
        raise Fault(Exit.CONFIG, "training without fp32 weights is not offered", words.where("-w"), fix)
    if left := [flag for flag in SILENT if words.given(flag)]:
        told.note(f"left out, they change nothing that is learnt: {words.where(*left).removeprefix('llm.c ')}")
