"""Runs the pods of ``docs/deploy`` on this machine as far as that goes without a cluster."""
