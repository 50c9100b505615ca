"""Run a measurement and keep its last JSON line as a record, with what it was measured on.

    python tests/soak/record.py NAME -- python tests/soak/loader_bench.py

Writes records/NAME.json: the answer, the exact command, commit, versions and machine. Exit code: the command's own.
"""

import datetime
import json
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from megatoken.config import Machine
from megatoken.device import open_device
from megatoken.hardware import cpu_count

RECORDS = Path(__file__).parents[2] / "records"


def main() -> int:
    name, dashes, *command = sys.argv[1:]
    assert dashes == "--", __doc__
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    sys.stdout.write(done.stdout)
    if done.returncode:
        return done.returncode
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    record = {
        "name": name,
        "date": datetime.date.today().isoformat(),
        "command": " ".join(command),
        "commit": commit,
        "hardware": {"device": open_device(Machine()).name, "cores": cpu_count(), "system": platform.machine()},
        "versions": {"python": platform.python_version(), **{p: version(p) for p in ("torch", "numpy", "tokenizers")}},
        "answer": json.loads(done.stdout.splitlines()[-1]),
    }
    RECORDS.mkdir(exist_ok=True)
    (RECORDS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
