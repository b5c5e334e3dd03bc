"""Jobs on a Kubernetes cluster, through its API server; nothing is installed there."""
