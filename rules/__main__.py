"""``python -m trainwarden.rules``: the same as the command ``trainwarden``."""

from trainwarden.rules.cli import main

if __name__ == "__main__":
    main()
