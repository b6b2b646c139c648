"""Fourier transforms: the dims that are transformed must be whole; linear in the argument."""

from tritondt.ops.along import lay_out_along

for _name in ("_fft_c2c", "_fft_r2c", "_fft_c2r"):
    lay_out_along(_name, linear_in=[(0,)])
