"""The targets of a path in `data.paths`: files, data sets, tasks that generate rows."""
