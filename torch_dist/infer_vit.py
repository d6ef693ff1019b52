"""A door to motley.infer.infer_vit, which has the words of ``-h``."""

import own_python  # noqa: F401

# isort: split

import sys

from motley.infer.infer_vit import main

if __name__ == "__main__":
    sys.exit(main())
