"""Rules that families of operators share: equations, whole dims, views, reductions."""
