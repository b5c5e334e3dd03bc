"""Jobs, their pods, logs and events, and the cluster's nodes, as the verbs show them. Changes nothing."""
