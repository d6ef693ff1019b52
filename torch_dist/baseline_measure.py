"""A door to motley.provision.baselines, which has the words of ``-h``."""

import own_python  # noqa: F401

# isort: split

import sys

from motley.provision.baselines import main

if __name__ == "__main__":
    sys.exit(main())
