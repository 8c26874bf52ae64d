"""The bridge on SGLang. `Engine` is SGLang's own class with `plugin=`; nothing happens before it is used.

For a program that makes its engines with `sglang.Engine` itself: name the spec file in the environment variable
CHUNKLLM_CONFIG, and `import chunkllm_bridge.sglang` before the first engine. Then every engine that the program starts
gets the bridge, and `engine.chunkllm` controls it. The import only remembers the wish (`launch.arm`); SGLang's own
classes are wrapped when it starts an engine. As SGLang's plugin loader imports this package too, the variable stands
for every engine of the program. Launches on a command line have `--plugin chunkllm`, and only that. Without the
variable the import has no effects.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chunkllm_bridge.sglang.offline import Engine

__all__ = ["Engine"]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from chunkllm_bridge.sglang.offline import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if os.environ.get("CHUNKLLM_CONFIG"):
    from chunkllm_bridge.sglang.launch import arm

    arm()
