"""The sections of the configuration: one pydantic model a section, one docstring a key."""
