"""Timelines of what ranks do: recorded on each, aligned to one clock, merged, and summed up."""
