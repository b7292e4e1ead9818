"""A real engine under load that a real Prometheus scrapes, well and with faults."""
