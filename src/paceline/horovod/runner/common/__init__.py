"""What scripts import of Horovod's launcher; paceline is the launcher."""
