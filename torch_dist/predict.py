"""A door to motley.infer.predict, which has the words of ``-h``."""

import own_python  # noqa: F401

# isort: split

import sys

from motley.infer.predict import main

if __name__ == "__main__":
    sys.exit(main())
