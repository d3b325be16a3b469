"""The door to the command: `slimbayes` and `python -m slimbayes_lab`, which need more than the library does.

Neither imports a file that lies in the current folder, nor do the processes that they start. `python -m` finds
slimbayes itself there if it is there, before this is run: `slimbayes`, or `python -P -m slimbayes_lab`, does not.
"""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # the current folder, which `python -m` puts there

import os


def main() -> None:
    """Run the command line, or say in one line what it lacks."""
    os.environ["PYTHONSAFEPATH"] = "1"  # for the processes that it starts
    try:
        from slimbayes_lab.command import main as command
    except ModuleNotFoundError as error:
        missing = (error.name or "slimbayes").partition(".")[0]
        if missing in ("slimbayes", "slimbayes_lab"):
            raise
        print(
            f'The slimbayes command needs {error.name}: pip install "slimbayes-lab"',
            file=sys.stderr,
        )
        raise SystemExit(3) from None  # as for any package that is missing
    command()


if __name__ == "__main__":
    main()
