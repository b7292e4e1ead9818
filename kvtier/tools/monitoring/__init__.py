"""Monitoring for operators: a dashboard for Grafana, and rules for Prometheus."""
