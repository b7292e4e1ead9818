"""Engines that share one bounded folder, killed at random, and measured from outside."""
