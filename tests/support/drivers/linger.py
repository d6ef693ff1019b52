"""A rank that does nothing and does not end with its parent: what a crash can leave."""

import sys
import time

from motley.launch.process import die_with_parent

die_with_parent(0)
print(f"lingering {sys.argv[1]}", flush=True)
time.sleep(600)
