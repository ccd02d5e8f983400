"""The timeline of a run: records spans, and reads them for Perfetto and for the page."""
