"""A door to motley.provision.verify_env, by an environment's own Python."""

import sys

from motley.provision.verify_env import main

if __name__ == "__main__":
    sys.exit(main())
