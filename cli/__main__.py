"""What does `python -m tidegate.cli` do? The same as `tidegate`; it adds nothing."""

from tidegate.cli.command import main

if __name__ == "__main__":
    main()
