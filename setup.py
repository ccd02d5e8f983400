"""For installers that do not read pyproject.toml; everything is said there."""

from setuptools import setup

setup()
