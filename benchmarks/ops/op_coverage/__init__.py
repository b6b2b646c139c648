"""How many of torch's operators run on distributed tensors, and whether they are right; see __main__.py."""
