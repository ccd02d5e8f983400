"""The two keys of an engine: one to generate, one to control it. They stand in no configuration,
log or command line.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, field

API_KEY = "RLCORE_ENGINE_API_KEY"
ADMIN_KEY = "RLCORE_ENGINE_ADMIN_KEY"


@dataclass(frozen=True)
class Keys:
    """What opens `/generate` and what reads (`api`), and what opens the control routes (`admin`)."""

    api: str = field(repr=False)
    admin: str = field(repr=False)

    @classmethod
    def from_environment(cls) -> Keys:
        """From `RLCORE_ENGINE_API_KEY` and `RLCORE_ENGINE_ADMIN_KEY`; what is not there is
        generated.
        """
        return cls(
            os.environ.get(API_KEY) or secrets.token_urlsafe(32),
            os.environ.get(ADMIN_KEY) or secrets.token_urlsafe(32),
        )
