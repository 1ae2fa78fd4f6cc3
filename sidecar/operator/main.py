"""`kvctl-coordinator`: with `--operator` the operator, otherwise the coordinator with its own store and API.

The two are one program because they are one thing with two memories. This module is where they part, above both, so
that neither has to know of the other.
"""

from __future__ import annotations

import os
import sys
from typing import Final

FLAG: Final = "--operator"


def main() -> int:
    """Run until SIGTERM. Returns the exit code."""
    if FLAG not in sys.argv[1:]:
        from sidecar.coordinator.main import main as coordinator

        return coordinator()
    return _operator([word for word in sys.argv[1:] if word != FLAG])


def _operator(arguments: list[str]) -> int:
    from sidecar.operator.config import load
    from sidecar.rpc.settings import ConfigError

    try:
        config = load(arguments, os.environ)
    except ConfigError as error:
        return _fail(str(error), 2)
    try:
        from sidecar.operator import app
    except ModuleNotFoundError as error:
        return _fail(f"{error}; the operator needs the extra: pip install 'kvctl[kubernetes]'", 4)
    from sidecar.coordinator.discovery import DiscoveryError

    try:
        if config.check:
            print(app.check(config))  # noqa: T201 - unlike write, it does nothing where stdout is closed
            return 0
        return app.run(config)
    except ValueError as error:
        return _fail(str(error), 2)
    except DiscoveryError as error:
        return _fail(str(error), 4)
    except OSError as error:
        return _fail(str(error.args[-1]), 4)


def _fail(message: str, code: int) -> int:
    print(f"kvctl-coordinator {FLAG}: {message}", file=sys.stderr)  # noqa: T201 - see above
    return code


if __name__ == "__main__":
    sys.exit(main())
