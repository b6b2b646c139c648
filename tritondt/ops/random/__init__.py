"""Random numbers that follow from an element's place in the whole tensor."""
