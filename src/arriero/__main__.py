"""``python -m arriero`` and the ``arriero`` command."""

from __future__ import annotations

import sys


def main() -> None:
    from arriero.cli.main import app
    from arriero.errors import UserError

    try:
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
