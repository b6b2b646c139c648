"""Context parallelism: attention over a sequence whose positions are cut over the ranks of an axis."""
