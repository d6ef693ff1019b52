"""The command ``motley``, as ``python -m motley``."""

from motley.cli import main

if __name__ == "__main__":
    main()
