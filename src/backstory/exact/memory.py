"""Memory that a sweep frees and takes again at every step stays with the process.

By default glibc gives a freed stretch of more than some MB back to the system. The products of a sweep free and take the same hundreds of
MB at every step, so that each of them would be faulted in again page by page: a quarter of the time of a product for GPT 4 × 128.
Other C libraries are left as they are.
"""

import ctypes
import platform
from functools import cache

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # the parameters of glibc's mallopt
KEPT = 1 << 30  # bytes
LARGEST = 1 << 25  # bytes of a block that old versions take from the heap


@cache
def keep_freed_memory() -> bool:
    """From now on at most 1 GiB that is freed stays with this process; False where that is not up to us."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool((mallopt(MMAP_THRESHOLD, KEPT) or mallopt(MMAP_THRESHOLD, LARGEST)) and mallopt(TRIM_THRESHOLD, KEPT))
