"""Configuration: one pydantic model a section. Importing this imports neither torch nor any engine."""

from rlcore.config.sections.root import Config

__all__ = ["Config"]
