"""Mixtures of experts: tokens go to the ranks of their experts and come back."""
