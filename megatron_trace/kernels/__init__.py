"""Triton kernels of the numerics room: native on Hopper and Blackwell, interpreted on a CPU (TRITON_INTERPRET=1) for tests.

Each equals its reference in ``megatron_trace.numerics`` bit for bit; ``numerics.dispatch`` chooses between them. Triton is
imported on the first launch only.
"""
