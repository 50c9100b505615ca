"""Run a program and write its last line that is a JSON object as a record.

    python benchmarks/record.py [--out FOLDER] NAME -- python -m tests.soak.commit_soak

Writes FOLDER/NAME.json (default records/), as `megatoken bench` does. Each JSON line is written at
once, marked as unfinished until the program ends with code 0. Exits with the program's code.
"""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from megatoken.base.config.schema import MachineConfig
from megatoken.base.system.device import open_device
from megatoken.study.bench.report import write_record

RECORDS = Path(__file__).parents[1] / "records"


def main() -> int:
    arguments = sys.argv[1:]
    records = RECORDS
    if arguments[0] == "--out":
        records = Path(arguments[1])
        arguments = arguments[2:]
    name, dashes, *command = arguments
    assert dashes == "--", __doc__
    # Background jobs of a shell ignore SIGINT, and the program would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    device = open_device(MachineConfig()).name
    arguments = [Path(command[0]).name, *command[1:]]
    result: dict[str, Any] = {}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        sys.stdout.write(line)
        sys.stdout.flush()
        if line.startswith("{"):
            result = json.loads(line)
            write_record(records, name, result | {"unfinished": True}, device, arguments)
    if code := process.wait():
        return code
    write_record(records, name, result, device, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
