"""``python -m motley`` is the command ``motley``."""

from motley.cli import main

if __name__ == "__main__":
    main()
