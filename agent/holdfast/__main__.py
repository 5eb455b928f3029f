"""`python -m holdfast`: the command line, also under launchers that start modules."""

from holdfast.cli import main

if __name__ == "__main__":
    main()
