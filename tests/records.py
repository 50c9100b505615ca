"""Which records of `records/` are older than the code they measured, and whether the documentation says so.

    python -m tests.records           exit 1 when a page calls an old record current, or a current one old (make check)
    python -m tests.records --mark    correct the pages

A record keeps a hash of every package it ran with; CODE says which of them decide its figures. Where a page links to
`records/NAME.json` and that code has changed since, a dagger follows the link. `make bench` and `make soak` renew.
"""

import json
import re
import sys
from pathlib import Path

from megatoken import LAYERS
from megatoken.bench.report import hash_code

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/*.md")
MARK = "†"
LINK = re.compile(r"records/([\w.-]+)\.json\)" + f"({MARK}?)")

STEP = ("model", "optim", "distributed", "train")
RUN = ("data", *STEP, "launch", "checkpoint", "pretrain")
CODE = {  # record: the packages whose code decides its figures; others: all
    **dict.fromkeys(("kills", "chaos", "guard-soak", "launch-soak", "train-soak"), RUN),
    "terminal-soak": ("console", *RUN),
    **dict.fromkeys(("commit-soak", "flips", "hash-cost"), ("system", "checkpoint")),
    **dict.fromkeys(
        ("prepare", "prepare-kills", "prepare-calls", "prepare-memory", "prepare-speed", "loader"),
        ("data",),
    ),
    **dict.fromkeys(
        (
            "peers",
            "peers-avx512-bf16",
            "peers-4x256",
            "peers-small-256",
            "peers-small-4096",
            "peers-small-50257",
        ),
        STEP,
    ),
    **dict.fromkeys(
        (
            *(
                "peers-avx512-bf16-transformers",
                "peers-avx512-bf16-llmc",
                "peers-avx512-bf16-half",
                "peers-4x256-avx512-bf16",
            ),
            *("peers-avx2", "peers-4x256-avx2"),
            *(
                f"peers-small-{ids}-{name}"
                for ids in (256, 4096, 50257)
                for name in ("avx512-bf16", "avx2")
            ),
        ),
        ("native", *STEP),
    ),
    **dict.fromkeys(
        ("ladder", "parts", "batch", "size", "ranks-curves", "ranks-race", "ranks-overlap"), STEP
    ),
    **{
        "attention": ("model",),
        "gemm": ("bench",),
        "generate": ("native", "model", "sampling"),
        "serve": ("native", "model", "sampling", "serving"),
        "harness": ("model", "eval"),
    },
    **{"config-soak": ("config",), "dryrun": ("model", "distributed", "estimate")},
    "sweep": ("cli", *RUN),
    "sink-soak": ("cli", "train"),
    "trl-oracle": ("objectives",),
    **dict.fromkeys(("vllm-route", "llamacpp-route"), ("data", "model", "convert", "sampling")),
    **dict.fromkeys(("rl-answers", "hacked-reward"), ("data", *STEP, "sampling", "objectives")),
    "native-loss": ("native", *STEP),
    "muon-sweep": ("model", "optim", "train"),
    "plan": ("estimate", *STEP),
    **{"scaling": ("estimate", "data", *STEP), "report": ("cli",)},
    "muon-overhead": STEP,
    "character-race": ("data", *STEP),
    "quickstart": ("config", "data", *STEP, "sampling"),
    **dict.fromkeys(
        ("race-learning-rate", "race-modern", "race-ablation", "race-optimizers"),
        ("config", "data", *STEP),
    ),
}


def list_changed(record: Path) -> list[str]:
    """The packages that have changed since a record was made; all that decide its figures if it does not say."""
    measured, now = json.loads(record.read_text()).get("code", {}), hash_code()
    return [name for name in CODE.get(record.stem, LAYERS) if measured.get(name) != now.get(name)]


def mark(text: str, records: Path) -> str:
    """The text with a dagger behind each link to a record whose code has changed, and behind no other."""

    def replace(link: re.Match[str]) -> str:
        path = records / f"{link[1]}.json"
        return link[0].removesuffix(MARK) + (MARK if path.is_file() and list_changed(path) else "")

    return LINK.sub(replace, text)


def main(words: list[str]) -> int:
    wrong = []
    for page in sorted(path for pattern in PAGES for path in ROOT.glob(pattern)):
        text = page.read_text()
        if (marked := mark(text, ROOT / "records")) != text:
            wrong.append(str(page.relative_to(ROOT)))
            if "--mark" in words:
                page.write_text(marked)
    if wrong and "--mark" not in words:
        fix = "python -m tests.records --mark, or renew them: make bench, make soak"
        print(
            f"error: records cited as newer or older than the code they measured — {', '.join(wrong)} — {fix}"
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
