"""Measurements that claims about speed and bytes rest on; what was measured lies in results/."""
