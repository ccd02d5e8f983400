"""What crosses the border of a process: requests that come in, variables that children get."""
