"""Policies that decide which blocks are worth writing to a tier."""
