"""The two keys of an engine: one to generate, one to control it.

They stand in no configuration, log or command line.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, field

API_KEY = "RLCORE_ENGINE_API_KEY"
ADMIN_KEY = "RLCORE_ENGINE_ADMIN_KEY"


@dataclass(frozen=True)
class Keys:
    """`api` opens `/generate` and the routes that read; `admin` opens the routes that control."""

    api: str = field(repr=False)
    admin: str = field(repr=False)

    @classmethod
    def from_environment(cls) -> Keys:
        """Read the keys from `RLCORE_ENGINE_API_KEY` and `RLCORE_ENGINE_ADMIN_KEY`.

        A key that is not set is generated.
        """
        return cls(
            os.environ.get(API_KEY) or secrets.token_urlsafe(32),
            os.environ.get(ADMIN_KEY) or secrets.token_urlsafe(32),
        )
