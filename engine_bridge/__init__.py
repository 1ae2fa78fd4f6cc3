"""What runs inside a vLLM engine process: carries kvctl's operations onto the engine's own thread.

Only the package `engine_bridge.engine` names vLLM; nothing here imports more than vLLM itself needs.
`engine_bridge.protocol` and `engine_bridge.page` are the schema shared with the sidecar and import neither.
"""

__version__ = "0.1.0"
