"""A door to motley.provision.test_deepspeed, which has the words of ``-h``."""

import sys

from motley.provision.test_deepspeed import main

if __name__ == "__main__":
    sys.exit(main())
