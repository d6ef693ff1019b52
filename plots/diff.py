"""A door to motley.plotting.run_diff, which has the words of ``-h``."""

import own_python  # noqa: F401

# isort: split

import sys

from motley.plotting.run_diff import main

if __name__ == "__main__":
    sys.exit(main())
