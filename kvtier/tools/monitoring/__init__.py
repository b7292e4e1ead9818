"""What operators watch engines with: a dashboard for Grafana, and rules for Prometheus."""
