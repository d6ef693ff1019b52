"""Check that the files of a run are intact: run.json, the records and each checkpoint.

    python torch_dist/verify.py logs/RUN
    python torch_dist/verify.py logs/RUN/checkpoints/step_00000120
    python torch_dist/verify.py logs/*/

The command reads all bytes of the checkpoints, compares their hashes with the saved hashes, and
names each damaged file. (--resume auto uses the newest checkpoint that is intact.) The command
needs no GPU. Exit code: 0 if all files are intact, 1 if a file is damaged, 2 if a path contains
neither a run nor a checkpoint.
"""

import argparse
import sys
from pathlib import Path

from motley.config.parser import OneVoice
from motley.errors import MotleyError
from motley.text import escape_unprintable


def main() -> int:
    """Check the paths on the command line, and return the exit code."""
    escape_unprintable()
    parser = OneVoice(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "paths", nargs="+", type=Path, metavar="RUN", help="a run's folder, or a checkpoint's"
    )
    paths = parser.parse_args().paths
    from motley.checkpoint.read import (
        verify,
    )  # imported here, because it loads torch, which -h does not need

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
