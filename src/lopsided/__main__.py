"""``python -m lopsided``: the command."""

from lopsided.cli import main

if __name__ == "__main__":
    main()
