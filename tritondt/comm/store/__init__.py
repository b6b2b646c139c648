"""The key-value store that connects ranks: asking with a bound, meeting, notices of failure."""
