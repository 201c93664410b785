"""What hides a peer's update from the others of its group: see `masks`. Differential privacy is in `marfl.dp`."""
