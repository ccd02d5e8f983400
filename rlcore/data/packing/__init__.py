"""Which sequences go to which optimizer step, rank and pack, and what a pack holds once."""
