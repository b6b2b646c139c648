"""Memory of a GPU that the processes of one host share: CUDA's virtual memory, and descriptors that are passed on."""
