"""Run a soak and write its last JSON line as a record, with the machine it ran on.

    python tests/soak/record.py [--out FOLDER] NAME -- python tests/soak/commit_soak.py

Writes FOLDER/NAME.json (records/ by default) as `megatoken bench` does. Exits with the command's exit code.
"""

import json
import signal
import subprocess
import sys
from pathlib import Path

from megatoken.bench.report import write_record
from megatoken.config.schema import MachineConfig
from megatoken.system.device import open_device

RECORDS = Path(__file__).parents[2] / "records"


def main() -> int:
    words = sys.argv[1:]
    records = RECORDS
    if words[0] == "--out":
        records, words = Path(words[1]), words[2:]
    name, dashes, *command = words
    assert dashes == "--", __doc__
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background job ignores it, and so would runs
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    sys.stdout.write(done.stdout)
    if done.returncode:
        return done.returncode
    answer = json.loads(done.stdout.splitlines()[-1])
    # The program's name, not its path on this machine.
    write_record(
        records,
        name,
        answer,
        open_device(MachineConfig()).name,
        [Path(command[0]).name, *command[1:]],
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
