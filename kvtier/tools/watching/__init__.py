"""Shows the state of running engines, from their ``/metrics``."""
