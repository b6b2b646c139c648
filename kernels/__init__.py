"""Copies, casts and reductions of strided boxes on the device: Triton kernels, and each again in plain torch."""

if __name__ != "tritondt.kernels":
    raise ImportError(
        f"this package was imported as {__name__!r}, and is tritondt.kernels only: under two names "
        "it would be two module objects with two JIT caches"
    )
