"""Triton kernels, their tables on the device, and what chooses their blocks."""

if __name__ != "tritondt.kernels.gpu":
    raise ImportError(
        f"this package was imported as {__name__!r}, and is tritondt.kernels.gpu only: under two names "
        "it would be two module objects with two JIT caches"
    )
