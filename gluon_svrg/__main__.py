"""``python -m gluon_svrg`` is ``gluon-svrg``."""

from __future__ import annotations

import sys


def main() -> int:
    """Run a command; an interrupt that it does not catch ends it with one line and no traceback."""
    try:
        from .commands.cli import main as run

        return run()
    except KeyboardInterrupt:
        print("gluon-svrg: ended by SIGINT", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
