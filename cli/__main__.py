"""Entry point of `python -m tidegate.cli`, the same as the command `tidegate`."""

from tidegate.cli.command import main

if __name__ == "__main__":
    main()
