"""Transports: how the boxes of an exchange get from rank to rank."""
