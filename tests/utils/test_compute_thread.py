"""The thread that computes has a stack of its own size."""

import ctypes
import threading

from trinity.utils.compute_thread import compute_thread


def stack_bytes() -> int:
    """Of the thread that asks."""
    libc = ctypes.CDLL(None)
    attributes, size = ctypes.create_string_buffer(64), ctypes.c_size_t()
    assert libc.pthread_getattr_np(ctypes.c_void_p(threading.get_ident()), attributes) == 0
    assert libc.pthread_attr_getstacksize(attributes, ctypes.byref(size)) == 0
    return size.value


def test_its_stack_is_large_and_those_of_others_are_as_before():
    before = threading.stack_size()
    with compute_thread("train") as executor:
        assert executor.submit(stack_bytes).result() >= 64 << 20
        assert executor.submit(threading.current_thread).result().name.startswith("train")
    assert threading.stack_size() == before
