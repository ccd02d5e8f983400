from __future__ import annotations

import sys
from pathlib import Path

# engine_kit
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "unit" / "rollout"))
