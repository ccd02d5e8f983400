"""The timeline of a run: spans are recorded as it goes, and read for Perfetto and for the page."""
