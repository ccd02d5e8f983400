"""Checks across sections of the configuration; `all_checks` lists them."""
