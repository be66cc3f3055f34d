"""`python -m twostroke` runs the `twostroke` command, also if the package is not installed."""

import sys

from twostroke.cli import main

if __name__ == "__main__":
    sys.exit(main())
