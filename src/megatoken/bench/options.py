"""Arguments of `megatoken bench NAME`, without torch: a typo costs a tenth of a second."""

import argparse
from collections.abc import Callable
from pathlib import Path

from megatoken.presets import PRESETS

Add = Callable[..., argparse.ArgumentParser]


def add_benches(add: Add) -> None:
    """Declare every bench; `add(name, doc)` makes its parser."""
    p = _bench(add, "ladder", "every speed-up one switch at a time, from plain PyTorch to what a run would use")
    _shape(p, every=True)
    p.add_argument("--batch-tokens", type=_count, help="tokens of a step (default 1024 on a CPU, 65536 on cuda)")
    p.add_argument("--rungs", default="", metavar="N,...", help="only these, counted from 1 (default all)")
    p = _bench(add, "gemm", "FLOP/s of matrix products over size and dtype; the best is this machine's peak")
    p.add_argument("--dtypes", default="auto", help="some of fp32,tf32,bf16,fp16, or auto: what the device is fast at, "
                   "and fp32 (default auto)")  # fmt: skip
    p.add_argument("--largest", type=int, default=0, help="largest square; 0: 4096 on a CPU, 8192 on mps, 16384 on "
                   "cuda (default 0)")  # fmt: skip
    p.add_argument("--tokens", type=int, default=1024, help="tokens of the GPT-2 124M step whose products are measured "
                   "too; 0: squares only (default 1024)")  # fmt: skip
    p = _bench(add, "loader", "tokens/s of the loader on one core: a first epoch with its checks, and later ones",
               device=False)  # fmt: skip
    p.add_argument("--shards", type=_count, default=4, help="shards of random ids (default 4)")
    p.add_argument("--shard-tokens", type=_count, default=12_500_000, help="tokens in each (default 12500000)")
    p = _bench(add, "prepare", "MB/s from text to shards, beside bare encoding by other libraries", device=False)
    p.add_argument("--megabytes", type=_count, default=20, help="text to prepare (default 20)")
    p.add_argument("--tokenizer", help="gpt2, bytes, bpe:N or a tokenizer.json (default gpt2 if its vocabulary is on "
                   "this machine, else bpe:4096)")  # fmt: skip
    p.add_argument("--source", metavar="FILE_OR_FOLDER", help="your own text (default made from Python's library)")
    p = _bench(add, "generate", "tokens/s of writing text at batch 1, beside transformers where it is installed")
    _shape(p)
    p.add_argument("--tokens", type=_count, default=256, help="new tokens (default 256)")
    p.add_argument("--prompt-tokens", type=_count, default=16, help="tokens before them (default 16)")
    p = _bench(add, "peers", "the same training step in other people's GPT-2s, each in a process of its own")
    _step(p)
    p.add_argument("--nanogpt", metavar="PATH", type=Path, help="your checkout of nanoGPT, or its model.py")
    p.add_argument("--build-nanogpt", metavar="PATH", type=Path, help="your checkout of build-nanogpt, or its "
                   "train_gpt2.py, of which only imports, classes and functions are run")  # fmt: skip
    p.add_argument("--only", metavar="NAME,...", help="some of transformers, litgpt, nanogpt, build-nanogpt "
                   "(default all that are there)")  # fmt: skip
    p.add_argument("--no-compile", action="store_true", help="leave out the compiled configurations of peers")
    p.add_argument("--all-configurations", action="store_true", help="bf16 also where the device is not fast at it")
    _add_sweeps(add)
    p = add("report", "records as one table, and what changed against other records beyond the noise")
    p.add_argument("folder", metavar="FOLDER", nargs="?", type=Path, default=Path("records"),
                   help="folder of records (default records)")  # fmt: skip
    p.add_argument("--against", metavar="FOLDER", type=Path, help="older records to compare with")


def _add_sweeps(add: Add) -> None:
    """Benches that grow something, and the one that takes a step apart."""
    p = _bench(add, "attention", "seconds and memory of a layer's attention in each of its forms over the context")
    _shape(p)
    p.add_argument("--longest", type=_count, help="longest context (default 2048 on a CPU, 4096 on mps, 16384 on cuda)")
    p.add_argument("--seqs", type=_count, default=1, help="sequences at once (default 1)")
    p.add_argument("--memory", type=float, default=0.0, metavar="GB", help="skip forms that would hold more; 0: more "
                   "than 80%% of what is free (default 0)")  # fmt: skip
    p = _bench(add, "batch", "tokens/s, MFU and memory of a step over its micro-batch, until memory ends")
    _shape(p, every=True)
    p.add_argument("--seq-len", type=_count, help="context (default the preset's)")
    p.add_argument("--largest", type=_count, help="largest micro-batch in sequences (default on cuda: until memory "
                   "ends; elsewhere: 8192 tokens)")  # fmt: skip
    p = _bench(add, "size", "what a token costs over the size of the model and over the context")
    p.add_argument("--only", metavar="NAME,...", help="models, contexts, or names of rows (default everything)")
    p.add_argument("--batch-tokens", type=_count, help="tokens of a step; of one over contexts, 2048 at least "
                   "(default 1024, on cuda 8192)")  # fmt: skip
    p = _bench(add, "knob", "what every value of a machine setting gains and costs: compile, recompute, micro_batch ..")
    p.add_argument("knob", metavar="SETTING", help="a field of `machine`: recompute for machine.recompute")
    p.add_argument("--values", default="", metavar="VALUE,...", help="some (default all of a setting that has words)")
    _step(p)
    p.add_argument("--micro-batch", type=_count, help="sequences of a forward (default all of the step)")
    p = _bench(add, "parts", "where the time of one training step goes, part by part, beside each part's floor")
    _shape(p)
    p.add_argument("--batch-tokens", type=_count, default=1024, help="tokens of the step (default 1024)")
    p.add_argument("--seq-len", type=_count, help="context (default the preset's, or the batch if that is shorter)")
    p.add_argument("--trace", action="store_true", help="profile one step into OUT/trace.json (ui.perfetto.dev)")


def _bench(add: Add, name: str, doc: str, *, device: bool = True) -> argparse.ArgumentParser:
    parser = add(name, doc)
    if device:
        parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps (default auto)")
    parser.add_argument("--repeats", type=int, default=5, help="timed repeats of each thing (default 5)")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder for NAME.json and pictures "
                        "(default runs/bench)")  # fmt: skip
    parser.add_argument("--name", help="name of the record (default the bench's)")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from 1 on")
    return int(text)


def _shape(parser: argparse.ArgumentParser, *, every: bool = False) -> None:
    """A preset: of a GPT, as the other contenders and the parts of a step are, unless the bench can do every one."""
    presets = [name for name, shape in PRESETS.items() if every or shape.positions == "learned"]
    parser.add_argument("--preset", default=presets[0], choices=presets, metavar="PRESET",
                        help=f"{', '.join(presets)} (default {presets[0]})")  # fmt: skip


def _step(parser: argparse.ArgumentParser) -> None:
    """A model of any size and the sequences of its step."""
    _shape(parser)
    for name, doc in (("n-layer", "transformer blocks"), ("n-head", "attention heads"), ("d-model", "width"),
                      ("vocab-size", "token ids before padding"), ("seq-len", "context")):  # fmt: skip
        parser.add_argument(f"--{name}", type=_count, help=f"{doc}, in place of the preset's")
    parser.add_argument("--batch-seqs", type=_count, default=1, help="sequences of a step (default 1)")
