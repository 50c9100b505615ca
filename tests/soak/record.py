"""Run a soak and keep its last JSON line as a record, with what it was measured on.

    python tests/soak/record.py [--out FOLDER] NAME -- python tests/soak/commit_soak.py

Writes FOLDER/NAME.json (records/ by default) as `megatoken bench` does. Exit code: the command's own.
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
    words = sys.argv[1:]
    records = RECORDS
    if words[0] == "--out":
        records, words = Path(words[1]), words[2:]
    name, dashes, *command = words
    assert dashes == "--", __doc__
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    sys.stdout.write(done.stdout)
    if done.returncode:
        return done.returncode
    answer = json.loads(done.stdout.splitlines()[-1])
    # The program's name, not its place on this machine.
    write_record(records, name, answer, open_device(Machine()), [Path(command[0]).name, *command[1:]])
    return 0


if __name__ == "__main__":
    sys.exit(main())
