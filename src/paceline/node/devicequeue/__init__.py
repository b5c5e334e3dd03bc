"""The queue in which jobs take turns with the devices of a machine."""
