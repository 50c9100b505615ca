"""Time the page of a run of 100,000 steps in a real browser.

    python -m benchmarks.report_page [--pictures FOLDER]

Writes metrics of 100,000 steps, 400 validations, 20 samples and 1,000 events, makes the page with
`megatoken report`, and opens it five times in headless Chromium. The time is from navigation to
the end of the load event, when all curves are drawn; a page may take 2 s. --pictures saves
screenshots, light and dark, 1280 and 390 wide. Prints one JSON line.
"""

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.quickstart_race import run
from tests.cli.browser import Browser, find_browser

STEPS, SECONDS, OPENINGS = 100_000, 2.0, 5


def write_metrics(folder: Path) -> None:
    """Write a run whose loss is a power law with noise."""
    folder.mkdir(parents=True)
    noise = random.Random(0)
    lines = []
    for step in range(1, STEPS + 1):
        position = {"step": step, "tokens": 524_288 * step, "elapsed_seconds": 0.35 * step}
        loss = 2.9 + 30 / (step + 20) ** 0.5 + noise.gauss(0, 0.03)
        values: dict[str, Any] = {
            "loss": loss,
            "lr": 3e-3 * math.cos(math.pi / 2 * step / STEPS),
            "seconds": 0.35,
        }
        values |= {
            "grad_norm": 0.3 + noise.expovariate(20),
            "tokens_per_second": 1.5e6 + noise.gauss(0, 1e4),
        }
        lines.append({"kind": "train", **position, **values, "mfu": 0.51, "mfu_causal": 0.47})
        if step % (STEPS // 400) == 0:
            lines.append(
                {
                    "kind": "val",
                    **position,
                    "loss": loss,
                    "bits_per_byte": loss / 3.2,
                    "target_tokens": 1,
                }
            )
        if step % (STEPS // 20) == 0:
            lines.append(
                {"kind": "sample", **position, "text": ["Hello, I am a language model, " * 20] * 4}
            )
        if step % (STEPS // 1000) == 0:
            lines.append(
                {
                    "kind": "event",
                    **position,
                    "what": "spike",
                    "message": "a loss far above the last 128 steps",
                }
            )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "status.json").write_text(
        json.dumps({"state": "done", "step": STEPS, "total_steps": STEPS})
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pictures", type=Path, help="folder for screenshots")
    options = parser.parse_args()
    program = find_browser()
    assert program, "no Chromium on this machine"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_metrics(folder / "long-run")
        start = time.perf_counter()
        page = folder / run(folder, "report", "long-run")["report"]
        result: dict[str, Any] = {
            "soak": "report",
            "steps": STEPS,
            "write_seconds": time.perf_counter() - start,
        }
        result["bytes"] = page.stat().st_size
        seconds = []
        with Browser(program) as browser:
            for _ in range(OPENINGS):
                browser.open(page.as_uri())
                seconds.append(
                    browser.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")
                    / 1000
                )
            result["charts"] = browser.evaluate("document.querySelectorAll('figure svg').length")
            result["requests"] = len(browser.list_requests())
            result["browser"] = browser.call("Browser.getVersion")["product"]
            for width, dark in (
                [(w, d) for w in (1280, 390) for d in (False, True)] if options.pictures else []
            ):
                browser.resize(width, dark=dark)
                browser.open(page.as_uri())
                browser.save_picture(
                    options.pictures / f"{width}-{'dark' if dark else 'light'}.png"
                )
    result |= {"open_seconds": statistics.median(seconds), "open_seconds_each": seconds}
    print(json.dumps(result), flush=True)
    return int(max(seconds) > SECONDS or result["requests"] != 1)


if __name__ == "__main__":
    sys.exit(main())
