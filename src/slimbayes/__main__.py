"""The door to the command: `slimbayes` and `python -m slimbayes`, which need more than the library does."""

import sys


def main() -> None:
    """Run the command line, or say in one line what it lacks."""
    try:
        from slimbayes.lab.command import main as command
    except ModuleNotFoundError as error:
        if (error.name or "slimbayes").partition(".")[0] == "slimbayes":
            raise
        print(
            f'The slimbayes command needs {error.name}: pip install "slimbayes[lab,report]"',
            file=sys.stderr,
        )
        raise SystemExit(3) from None  # as for any package that is missing
    command()


if __name__ == "__main__":
    main()
