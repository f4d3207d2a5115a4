"""What does `python -m tidegate.orchestrator.cli` do? The same as `tidegate`; it adds nothing."""

from tidegate.orchestrator.cli.command import main

if __name__ == "__main__":
    main()
