"""Say whether what a run has left is whole: run.json, its records, each checkpoint.

    python torch_dist/verify.py logs/RUN
    python torch_dist/verify.py logs/RUN/checkpoints/step_00000120
    python torch_dist/verify.py logs/*/

Reads every byte of the checkpoints and compares it with the hashes that were saved. Names each
damaged file; --resume auto takes the newest checkpoint that is whole. Needs no GPU. Exit code: 0 if
all is whole, 1 if something is damaged, 2 if there is nothing to look at.
"""

import argparse
import sys
from pathlib import Path

from motley.config.parser import OneVoice
from motley.errors import MotleyError
from motley.text import escape_unprintable


def main() -> int:
    """Look at what the command line names."""
    escape_unprintable()
    parser = OneVoice(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "paths", nargs="+", type=Path, metavar="RUN", help="a run's folder, or a checkpoint's"
    )
    paths = parser.parse_args().paths
    from motley.checkpoint.read import verify  # which loads torch: not for -h

    code = 0
    for path in paths:
        try:
            for result in verify(path):
                print(f"{'DAMAGED' if result.damaged else 'ok'}  {result.text}", flush=True)
                code = max(code, int(result.damaged))
        except MotleyError as error:
            print(f"motley: {error}", file=sys.stderr)
            code = 2
    return code
