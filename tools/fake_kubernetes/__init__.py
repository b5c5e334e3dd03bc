"""A fake Kubernetes for tests and benchmarks: an API server, controllers and nodes on one machine; see README.md."""
