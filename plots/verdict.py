"""A door to motley.plotting.run_verdict, which has the words of ``-h``."""

import own_python  # noqa: F401

# isort: split

import sys

from motley.plotting.run_verdict import main

if __name__ == "__main__":
    sys.exit(main())
