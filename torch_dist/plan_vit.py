"""A door to motley.train.plan_vit, which has the words of ``-h``."""

import own_python  # noqa: F401

# isort: split

from motley.train.plan_vit import main

if __name__ == "__main__":
    main()
