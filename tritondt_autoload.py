"""The name of tritondt's backend, which torch learns at its own import: entry point of the group "torch.backends".

`dist.init_process_group("tritondt")` then needs no `import tritondt`. It stands outside the package so that programs
which never use the backend import none of it; torch leaves it out where TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set.
"""

import sys
from importlib import import_module
from typing import Any


def register() -> None:
    """Makes the name "tritondt" known to torch.distributed; takes microseconds, and imports nothing of the package."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is not None:  # absent where torch was built without torch.distributed
        c10d.Backend.register_backend("tritondt", _group, extended_api=True, devices=["cpu", "cuda"])


def _group(options: Any, backend_options: object = None) -> Any:
    is_late = "tritondt" not in sys.modules
    importing: Any = import_module("tritondt._importing")
    if is_late:
        importing.came_late = True
        store = options.store
        while hasattr(getattr(store, "underlying_store", None), "underlying_store"):
            store = store.underlying_store
        import_module("tritondt.comm.store.starts").check_keys(store)
    return importing.group(options, backend_options)
