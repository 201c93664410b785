"""The built-in tasks, one file each."""
