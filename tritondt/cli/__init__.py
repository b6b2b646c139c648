"""The command line: `python -m tritondt`."""
