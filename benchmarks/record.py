"""Run a program and write its last line, a JSON object, as a record.

    python benchmarks/record.py [--out FOLDER] NAME -- python -m tests.soak.commit_soak

Writes FOLDER/NAME.json (default records/), as `megatoken bench` does. Exits with the program's
code.
"""

import json
import signal
import subprocess
import sys
from pathlib import Path

from megatoken.bench.report import write_record
from megatoken.config.schema import MachineConfig
from megatoken.system.device import open_device

RECORDS = Path(__file__).parents[1] / "records"


def main() -> int:
    words = sys.argv[1:]
    records = RECORDS
    if words[0] == "--out":
        records = Path(words[1])
        words = words[2:]
    name, dashes, *command = words
    assert dashes == "--", __doc__
    # Background jobs of a shell ignore SIGINT, and the program would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    sys.stdout.write(done.stdout)
    if done.returncode:
        return done.returncode
    answer = json.loads(done.stdout.splitlines()[-1])
    words = [Path(command[0]).name, *command[1:]]
    write_record(records, name, answer, open_device(MachineConfig()).name, words)
    return 0


if __name__ == "__main__":
    sys.exit(main())
