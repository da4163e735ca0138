"""A thread that computes."""

import threading
from concurrent.futures import ThreadPoolExecutor

_STACK_BYTES = 64 << 20


def compute_thread(name: str) -> ThreadPoolExecutor:
    """One thread, with room for calls as deep as `torch.compile` makes them.

    PyTorch 2.11 needs more than the 8 MB that a thread has by default, and dies without.
    """
    before = threading.stack_size(_STACK_BYTES)
    try:
        executor = ThreadPoolExecutor(1, thread_name_prefix=name)
        executor.submit(int).result()  # starts the thread
    finally:
        threading.stack_size(before)
    return executor
