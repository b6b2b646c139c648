"""How long a call of CUDA's takes the host, in nanoseconds: published figures, and guesses where there are none.

All of them depend on processor and driver; what is timed over them says how the host's work compares with a limit, and
not what a machine takes.
"""

COSTS_NS = {
    # A guess between 2 and 2.5 us, as launches on an idle queue are commonly measured; torch's own profiler shows 4 to
    # 5 us, most of it the profiler's.
    "launch": 2500,
    # The fastest of 100,808 calls of cudaEventRecord under Nsight was 534 ns: github.com/rapidsai/rmm/issues/448.
    "event_record": 600,
    # Record and wait are of the order of 1 us together: github.com/chelsea0x3b/cudarc/pull/335.
    "stream_wait_event": 500,
    # A guess: it reads what the device has written, and takes the driver's lock.
    "event_query": 400,
    # A guess: a field of the stream is read, under its lock.
    "is_capturing": 100,
    # A guess: Triton's launcher asks for each tensor that it is given.
    "pointer_attribute": 200,
    # A block that torch's caching allocator has takes a few hundred nanoseconds (jiahuanglin.xyz, "CUDA memory & the
    # caching allocator"), a whole torch.empty up to 1 us (jvoltci.github.io/mosaic, "PyTorch Caching Allocator"). This
    # is 500 for a block and, as a guess, 500 for its return; the rest of torch.empty runs, with the CPU's memory.
    "allocation": 1000,
}
NO_COSTS = dict.fromkeys(COSTS_NS, 0)
