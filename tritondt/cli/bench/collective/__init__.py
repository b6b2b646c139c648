"""`bench COLLECTIVE`: times and bandwidths of collectives, in the conventions of nccl-tests."""
