"""The key-value store that connects ranks: bounded calls, rendezvous, notices of failure."""
