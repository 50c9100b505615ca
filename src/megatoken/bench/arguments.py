"""Arguments of `megatoken bench NAME`, without torch: a typo costs a tenth of a second."""

import argparse
from collections.abc import Callable
from pathlib import Path

from megatoken.config.presets import PRESETS
from megatoken.system.atomic_write import local_path

Add = Callable[..., argparse.ArgumentParser]


def add_benches(add: Add) -> None:
    """Declare every bench; `add(name, doc)` makes its parser."""
    p = _bench(
        add,
        "ladder",
        "the training step with one speed-up more at a time, from plain PyTorch to a run's",
    )
    _add_preset(p)
    p.add_argument(
        "--batch-tokens",
        type=_count,
        help="tokens of a step (default 1024 on a CPU, 65536 on cuda)",
    )
    p.add_argument(
        "--rungs", default="", metavar="N,...", help="only these, counted from 1 (default all)"
    )
    p = _bench(
        add,
        "gemm",
        "FLOP/s of matrix products, squares and those of layers by tokens and width; the best is the peak",
    )
    p.add_argument(
        "--largest",
        type=_count,
        help="largest square (default 4096 on a CPU, 8192 on mps, 16384 on cuda)",
    )
    p = _bench(
        add, "attention", "time and memory of each attention implementation, by context length"
    )
    _add_preset(p, gpt_only=True)
    p.add_argument(
        "--longest",
        type=_count,
        help="longest context (default 2048 on a CPU, 4096 on mps, 16384 on cuda)",
    )
    p.add_argument("--seqs", type=_count, default=1, help="sequences at once (default 1)")
    p = _bench(
        add, "batch", "tokens/s, MFU and memory of a step, by micro-batch size, until out of memory"
    )
    _add_preset(p)
    p.add_argument("--seq-len", type=_count, help="context (default the preset's)")
    p.add_argument(
        "--largest",
        type=_count,
        help="most sequences (default on cuda what fits, elsewhere 8192 tokens)",
    )
    p = _bench(add, "size", "time per token, by model size and by context length")
    p.add_argument(
        "--batch-tokens", type=_count, help="tokens of a step (default 1024, on cuda 8192)"
    )
    p = _bench(
        add, "knob", "compare the values of a machine setting: compile, attention, micro_batch .."
    )
    p.add_argument(
        "setting", metavar="SETTING", help="a field of `machine`, such as compile or fused"
    )
    p.add_argument(
        "--values",
        default="",
        metavar="VALUE,...",
        help="some (default all of a setting that has words)",
    )
    _add_step(p)
    p.add_argument(
        "--micro-batch", type=_count, help="sequences of a forward (default all of the step)"
    )
    p = _bench(add, "peers", "compare the training step with other GPT-2 implementations")
    _add_step(p, gpt_only=True)
    p.add_argument(
        "--nanogpt",
        metavar="PATH",
        type=local_path,
        help="your checkout of nanoGPT, or its model.py",
    )
    p.add_argument("--build-nanogpt", metavar="PATH", type=local_path, help="your checkout of build-nanogpt, or its "
                   "train_gpt2.py, of which only imports, classes and functions are run")  # fmt: skip
    doc = "your checkout of llm.c, whose C trainer is built with its Makefile's flags and timed in fp32"
    p.add_argument("--llmc", metavar="PATH", type=local_path, help=doc)
    p.add_argument(
        "--only",
        metavar="NAME,...",
        help="some of transformers, nanogpt, build-nanogpt, llmc (default all)",
    )
    p.add_argument(
        "--no-compile", action="store_true", help="leave out the compiled configurations of peers"
    )
    p.add_argument(
        "--precision",
        choices=("fp32", "bf16"),
        help="of peers alone (default both where bf16 is fast)",
    )
    p = _bench(
        add,
        "parts",
        "where the time of one training step goes: products, attention, norm, loss, optimizer ..",
    )
    _add_preset(p)
    p.add_argument(
        "--batch-tokens", type=_count, default=1024, help="tokens of the step (default 1024)"
    )
    p.add_argument(
        "--seq-len",
        type=_count,
        help="context (default the preset's, or the batch if that is shorter)",
    )
    p.add_argument(
        "--precision",
        choices=("auto", "fp32", "bf16", "fp16"),
        default="auto",
        help="as machine.precision",
    )
    p.add_argument(
        "--trace",
        action="store_true",
        help="write the last profiled step to OUT/trace.json, for Perfetto",
    )
    p = _bench(
        add,
        "loader",
        "tokens/s of the data loader on one core, in the first epoch and later",
        device=False,
    )
    p.add_argument("--shards", type=_count, default=4, help="shards of random ids (default 4)")
    p.add_argument(
        "--shard-tokens", type=_count, default=12_500_000, help="tokens in each (default 12500000)"
    )
    p = _bench(
        add, "prepare", "MB/s of `prepare`, and of the tokenizers library alone", device=False
    )
    p.add_argument("--megabytes", type=_count, default=20, help="text to prepare (default 20)")
    p.add_argument(
        "--tokenizer",
        help="gpt2, bytes, bpe:N or a tokenizer.json (default gpt2 if it is here, else bpe)",
    )
    p = _bench(
        add, "generate", "tokens/s of decoding at batch 1, also of transformers if installed"
    )
    _add_preset(p, gpt_only=True)
    p.add_argument("--tokens", type=_count, default=256, help="new tokens (default 256)")
    p.add_argument(
        "--prompt-tokens", type=_count, default=16, help="tokens before them (default 16)"
    )
    p = add(
        "report",
        "records as one table; changes beyond the noise against older ones; of several machines a scoreboard",
    )
    doc = "default records; several: the speeds that their records share, with ratios and bars"
    p.add_argument(
        "folders", metavar="FOLDER", nargs="*", type=local_path, default=[Path("records")], help=doc
    )
    p.add_argument(
        "--against", metavar="FOLDER", type=local_path, help="older records to compare with"
    )
    p.add_argument(
        "--record",
        metavar="NAME",
        type=_record_name,
        help="scoreboard of all speeds of this record",
    )
    p.add_argument("--plot", metavar="FILE", type=local_path, help="PNG for the scoreboard")


def _bench(add: Add, name: str, doc: str, *, device: bool = True) -> argparse.ArgumentParser:
    parser = add(name, doc)
    if device:
        parser.add_argument(
            "--device", default="auto", help="auto, cpu, cuda, cuda:N or mps (default auto)"
        )
    parser.add_argument(
        "--repeats", type=_count, default=5, help="timed repeats of each thing (default 5)"
    )
    parser.add_argument(
        "--out", type=local_path, default=Path("runs/bench"), help="folder (default runs/bench)"
    )
    parser.add_argument(
        "--name", type=_record_name, help="name of the record (default the bench's)"
    )
    return parser


def _record_name(text: str) -> str:
    if Path(text).name != text:
        raise argparse.ArgumentTypeError(f"{text!r} is not a file name; --out names the folder")
    return text


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from 1 on")
    return int(text)


def _add_preset(parser: argparse.ArgumentParser, *, gpt_only: bool = False) -> None:
    presets = [
        name for name, config in PRESETS.items() if config.pos_emb == "learned" or not gpt_only
    ]
    parser.add_argument("--preset", default=presets[0], choices=presets, metavar="PRESET",
                        help=f"{', '.join(presets)} (default {presets[0]})")  # fmt: skip


def _add_step(parser: argparse.ArgumentParser, *, gpt_only: bool = False) -> None:
    """A model of any size and the sequences of its step."""
    _add_preset(parser, gpt_only=gpt_only)
    for name, doc in (("n-layer", "transformer blocks"), ("n-head", "attention heads"), ("d-model", "width"),
                      ("vocab-size", "token ids before padding"), ("seq-len", "context")):  # fmt: skip
        parser.add_argument(f"--{name}", type=_count, help=f"{doc}, in place of the preset's")
    parser.add_argument(
        "--batch-seqs", type=_count, default=1, help="sequences of a step (default 1)"
    )
