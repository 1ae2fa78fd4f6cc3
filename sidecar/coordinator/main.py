"""`kvctl-coordinator`: from a shell's words to a running application, and back to an exit code.

Exit codes: 0 after a clean end, 2 for settings that cannot be used, 4 for an address, file or store that cannot be had,
1 for a defect. SIGTERM is handled before anything heavy is imported: as PID 1 of a container a process without a
handler ignores it, and a container that ignores SIGTERM while it starts is killed 30 s later.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import NoReturn


def _leave(number: int, _frame: FrameType | None) -> NoReturn:
    os._exit(128 + number if number == signal.SIGINT else 0)


def main() -> int:
    """Run until SIGTERM. Returns the exit code."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    from sidecar.coordinator.config import load
    from sidecar.rpc.settings import ConfigError

    try:
        config = load(sys.argv[1:], os.environ)
    except ConfigError as error:
        return _fail(str(error), 2)
    from sidecar.coordinator import app
    from sidecar.coordinator.discovery import DiscoveryError
    from sidecar.coordinator.schema import StoreError

    try:
        if config.check:
            print(app.check(config))  # noqa: T201 - unlike write, it does nothing where stdout is closed
            return 0
        return app.run(config)
    except ValueError as error:
        return _fail(str(error), 2)
    except (StoreError, DiscoveryError) as error:
        return _fail(str(error), 4)
    except OSError as error:
        return _fail(_without_number(error), 4)


def _without_number(error: OSError) -> str:
    """Errors made here carry their whole text last; those of the system have a file name beside it."""
    text = str(error.args[-1]) if error.args else str(error)
    return f"{error.filename}: {text}" if error.filename else text


def _fail(message: str, code: int) -> int:
    print(f"kvctl-coordinator: {message}", file=sys.stderr)  # noqa: T201 - see above
    return code


if __name__ == "__main__":
    sys.exit(main())
