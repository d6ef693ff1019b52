"""A door to motley.infer.generate, which has the words of ``-h``."""

import own_python  # noqa: F401

# isort: split

import sys

from motley.infer.generate import main

if __name__ == "__main__":
    sys.exit(main())
