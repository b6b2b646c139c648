"""Flight records and the watch over exchanges that take too long."""
