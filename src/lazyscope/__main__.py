"""The `lazyscope` command, which reports the missing extra if its dependencies are not installed."""

from __future__ import annotations

import sys
from importlib.metadata import version

from lazyscope.errors import MissingExtraError
from lazyscope.extras import required


def main() -> None:
    """Run the `lazyscope` command. `lazyscope --help` lists the commands and the exit codes."""
    if sys.argv[1:] == ["--version"]:
        print(f"lazyscope {version('lazyscope')}")
        return
    try:
        for package in ("typer", "matplotlib", "jinja2"):
            required(package, "inspect", "The commands of lazyscope")
    except MissingExtraError as error:
        print(f"lazyscope: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    from lazyscope.cli import main as run

    run()


if __name__ == "__main__":
    main()
