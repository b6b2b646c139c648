"""Random numbers that depend on an element's position in the global tensor, not on its layout."""
