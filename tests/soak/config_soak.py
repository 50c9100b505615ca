"""Bad configs, each in a process of its own, and canary secrets in every command. Prints one JSON line at the end.

    python -m tests.soak.config_soak --configs 0 --limit 2

Every case of tests/config/bad_configs.py must end within `--limit` seconds with exit code 2 and one line that names the
place and the fix; the slowest times are reported. Then 20 secrets stand in the environment, the recipe and addresses
while every command runs and fails: none may be in any output or file.
"""

import argparse
import json
import subprocess
import tempfile
import time
from pathlib import Path

from megatoken.errors import ExitCode
from megatoken.launch.local import COMMAND
from tests.cli.canaries import run_matrix
from tests.config.bad_configs import KINDS, BadConfig


def run_case(case: BadConfig, folder: Path) -> tuple[float, list[str]]:
    """Seconds from start to end, and what was wrong with the answer."""
    recipe = folder / "r.yaml"
    recipe.write_bytes(case.recipe)
    words = [*COMMAND, "train", *case.arguments(str(recipe))]

    start = time.monotonic()
    try:
        done = subprocess.run(words, capture_output=True, text=True, cwd=folder, timeout=60)
    except ValueError:  # a NUL, which no system passes on
        return 0.0, []
    seconds = time.monotonic() - start
    mistakes = case.find_mistakes(done.stderr, str(recipe))
    if done.returncode != ExitCode.CONFIG:
        mistakes.append(f"exit code {done.returncode}")
    left = [path.name for path in folder.iterdir() if path != recipe]
    return seconds, mistakes + [f"left behind: {name}" for name in left]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--configs", type=int, default=0, help="the first N cases; 0: all")
    parser.add_argument("--limit", type=float, default=2.0, help="seconds that a refusal may take")
    options = parser.parse_args()
    cases = [case for kind in KINDS for case in kind()][: options.configs or None]
    times: dict[str, float] = {}
    mistakes: dict[str, list[str]] = {}
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            times[case.name], found = run_case(case, Path(folder))
        late = [f"{times[case.name]:.1f} s"] if times[case.name] > options.limit else []
        if found or late:
            mistakes[case.name] = found + late
            print(f"{case.name}: {'; '.join(found + late)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        canaries, commands, hits = run_matrix(Path(folder))
    slowest = sorted(times, key=times.__getitem__)[-3:]
    answer = {
        "bad_configs": len(cases),
        "refused_in_one_line_in_time": len(cases) - len(mistakes),
        "limit_seconds": options.limit,
        "median_seconds": round(sorted(times.values())[len(times) // 2], 2),
        "slowest_seconds": {name: round(times[name], 2) for name in reversed(slowest)},
        "canaries": canaries,
        "commands": commands,
        "canaries_found": hits,
    }
    print(json.dumps(answer))
    return 1 if mistakes or hits else 0


if __name__ == "__main__":
    raise SystemExit(main())
