"""Redistributions between specs: compiled once, run or issued, differentiable."""
