"""Peers: two gateways and more on one loop, with scripted workers."""
