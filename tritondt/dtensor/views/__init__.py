"""Views whose elements had to move: the copies in their place, and what each copy stands for."""
