"""A door to motley.checkpoint.verify_run, which has the words of ``-h``."""

import own_python  # noqa: F401

# isort: split

import sys

from motley.checkpoint.verify_run import main

if __name__ == "__main__":
    sys.exit(main())
