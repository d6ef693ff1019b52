"""A door to motley.provision.test_torch_gpu, which has the words of ``-h``."""

import sys

from motley.provision.test_torch_gpu import main

if __name__ == "__main__":
    sys.exit(main())
