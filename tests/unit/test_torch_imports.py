"""Torch that is imported late: modules of it are loaded once, whichever import comes first."""

from __future__ import annotations

import subprocess
import sys

import pytest

LATER = "from rlcore.import_paths import import_torch_lazily; import_torch_lazily()"
ONCE = """
import sys
for name, module in list(sys.modules.items()):
    if name.startswith("torch.nn") and module is not None and module.__spec__ is not None:
        assert module.__spec__.name == module.__name__, name
assert sys.modules["torch.nn"] is sys.modules["torch"].nn
"""


@pytest.mark.parametrize(
    "line",
    [
        "from torch.overrides import TorchFunctionMode",
        "import torch.nn.functional as F; assert F is sys.modules['torch'].nn.functional",
        "import torch.nn; assert torch.nn.Linear(2, 2)(torch.ones(2)).shape == (2,)",
        "import torch.utils.mobile_optimizer as m; assert torch.utils.mobile_optimizer is m",
    ],
)
def test_a_module_of_torch_may_be_the_first_that_is_imported(line: str) -> None:
    script = "\n".join(["import sys", LATER, "import torch", line, ONCE])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_module_that_torch_has_not_is_not_found() -> None:
    script = f"{LATER}\nimport torch.nonsense"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "No module named 'torch.nonsense'" in done.stderr


def test_torch_stays_unloaded_until_it_is_used() -> None:
    script = f"{LATER}\nimport sys, torch\nassert 'torch.nn' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
