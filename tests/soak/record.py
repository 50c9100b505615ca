"""Run a soak and keep its last JSON line as a record, with what it was measured on.

    python tests/soak/record.py NAME -- python tests/soak/commit_soak.py

Writes records/NAME.json as `megatoken bench` does. Exit code: the command's own.
"""

import json
import subprocess
import sys
from pathlib import Path

from megatoken.bench.record import write_record
from megatoken.config import Machine
from megatoken.device import open_device

RECORDS = Path(__file__).parents[2] / "records"


def main() -> int:
    name, dashes, *command = sys.argv[1:]
    assert dashes == "--", __doc__
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    sys.stdout.write(done.stdout)
    if done.returncode:
        return done.returncode
    write_record(RECORDS, name, json.loads(done.stdout.splitlines()[-1]), open_device(Machine()), command)
    return 0


if __name__ == "__main__":
    sys.exit(main())
