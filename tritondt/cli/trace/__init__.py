"""`trace`: a program of ranks, run with a recording, and its timeline and summary."""
