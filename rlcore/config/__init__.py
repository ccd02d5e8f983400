"""Configuration: one pydantic model per section. Imports neither torch nor any engine."""

from rlcore.config.sections.root import Config

__all__ = ["Config"]
