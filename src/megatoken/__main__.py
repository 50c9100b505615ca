"""`python -m megatoken`: the command without its entry point."""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # the current folder, whose files may be named like modules

from megatoken.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
