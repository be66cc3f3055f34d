"""A process that announces itself, repeats its input lines, and ignores the end of its stdin."""

import sys
import time

print("ready", flush=True)
for line in sys.stdin:
    print(line, end="", flush=True)
time.sleep(600)
