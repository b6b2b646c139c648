"""Layouts of a tensor on a mesh: placements, cuts, boxes, and specs on a real mesh."""
