"""A door to motley.provision.hello_mpi, which has the words of ``-h``."""

import sys

from motley.provision.hello_mpi import main

if __name__ == "__main__":
    sys.exit(main())
