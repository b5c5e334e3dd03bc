"""What does not depend on a framework: errors, process sets, elastic states."""
