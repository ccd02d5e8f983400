"""What a path of `data.paths` may stand for: files, data sets, tasks that make their rows."""
