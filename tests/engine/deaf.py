"""A process that says that it is here, repeats its lines, and does not end when they do."""

import sys
import time

print("here", flush=True)
for line in sys.stdin:
    print(line, end="", flush=True)
time.sleep(600)
