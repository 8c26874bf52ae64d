"""torchvision's wheel for CUDA beside a torch for CPUs: its operators are declared, so that it can be imported.

The compiled half of that wheel does not load there, and `torchvision._meta_registrations` then stops at operators that
nobody has defined. Serving text never calls one. `scripts/envs.py` puts this file and a .pth that imports it into
SGLang's environment; it does nothing until somebody imports torchvision. It goes when the lock can name a torchvision
that is built for the CPU (docs/sglang.md).
"""

from __future__ import annotations

import importlib.abc
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Declarations(importlib.abc.MetaPathFinder):
    """Looks at one import just before it happens; leaves the finding to the others."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> None:
        if name == "torchvision._meta_registrations" and path:
            import torch

            self.library = torch.library.Library("torchvision", "FRAGMENT")
            text = Path(path[0], "_meta_registrations.py").read_text()
            for operator in sorted(set(re.findall(r'"torchvision::(\w+)"', text))):
                if not hasattr(torch.ops.torchvision, operator):
                    self.library.define(f"{operator}(Tensor x) -> Tensor")


sys.meta_path.insert(0, Declarations())
