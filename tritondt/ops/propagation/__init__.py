"""The propagator: from the specs of an operator's arguments to those of its results."""
