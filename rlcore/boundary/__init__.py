"""Process boundaries: incoming HTTP requests, and the environments of child processes."""
