from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = (
    *("torch", "numpy", "transformers", "megatron", "pyarrow", "aiohttp"),
    *("rlcore.algorithms", "backends", "rollout"),
)


@pytest.mark.parametrize("module", ["rlcore.config", "rlcore.config.derived", "rlcore.cli"])
def test_nothing_heavy_is_imported(module):
    script = f"import sys, {module}; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == []
