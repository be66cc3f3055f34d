"""`python -m twostroke.entrypoints.openai.api_server --model M …` is `twostroke serve …`."""

import sys

from twostroke.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
