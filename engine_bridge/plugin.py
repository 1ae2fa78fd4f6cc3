"""What vLLM loads, in the API server, in every engine core and in every worker: entry point `vllm.general_plugins`.

Registering only wraps classes; a thread, a socket or a file exists only once an engine core does. KVCTL_BRIDGE=0
switches the bridge off, and nothing that goes wrong here may keep vLLM from starting.

The bridge logs below vLLM's own logger: its lines come out where vLLM's do, in vLLM's form and from vLLM's level on.
"""

from __future__ import annotations

import logging
import os

logger = logging.getLogger("vllm.kvctl")

_OFF = ("0", "off", "false", "no")


def register() -> None:
    """Called by vLLM, possibly several times in a process."""
    if os.environ.get("KVCTL_BRIDGE", "1").strip().lower() in _OFF:
        return
    try:
        from engine_bridge.engine import hooks

        hooks.install()
    except Exception:
        logger.exception("kvctl: the engine bridge does not fit this vLLM and is off; the engine serves without it")
