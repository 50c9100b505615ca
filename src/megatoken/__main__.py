"""The `megatoken` command, also as `python -m megatoken`."""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # the current folder, whose files could shadow modules

import os
import signal

STOP_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP")
STOPPED = 75


def main() -> int:
    """Run the command.

    A signal that arrives while `train` is still being imported ends it with the exit code of a
    stopped run. With --ending the signal is not handled, because torchrun, the parent, would count
    that code as a failure.
    """
    if sys.argv[1:2] == ["train"] and "--ending" not in sys.argv:
        for name in STOP_SIGNALS:
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, lambda *_: os._exit(STOPPED))
    from megatoken.cli.main import main

    return main()


if __name__ == "__main__":
    sys.exit(main())
