"""Endpoints that other daemons call."""
