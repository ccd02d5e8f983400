"""Graders that are built in. Their arguments are declared in `rlcore.config.sections.graders`."""
