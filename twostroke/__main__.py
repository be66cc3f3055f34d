"""`python -m twostroke`: the command, without an installed script."""

import sys

from twostroke.cli import main

if __name__ == "__main__":
    sys.exit(main())
