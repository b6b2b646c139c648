"""`doctor flight`: findings from the flight recorders of all ranks."""
