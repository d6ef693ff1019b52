"""A rank that does nothing and does not end with its parent: what a crash can leave."""

import sys
import time

print(f"lingering {sys.argv[1]}", flush=True)
time.sleep(600)
