"""The entry point of ``python -m motley``, which runs the command ``motley``."""

from motley.cli import main

if __name__ == "__main__":
    main()
