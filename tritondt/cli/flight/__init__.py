"""`doctor flight`: what the flight recorders of all ranks say together."""
