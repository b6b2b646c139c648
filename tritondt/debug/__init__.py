"""Tools that show moved data, the ranks that hold each element, and wrong values."""

from tritondt.debug.comm_mode import CommDebugMode, Count, write_flight_record
from tritondt.debug.plain_gradients import check_plain_gradients
from tritondt.debug.sharding_picture import sharding_html, sharding_text, visualize_sharding, write_sharding_image
from tritondt.debug.single_device import check_against_single_device
from tritondt.debug.tracing.recording import mark_step
from tritondt.redistribution.implicit import explicit_redistribution

__all__ = [
    "CommDebugMode",
    "Count",
    "check_against_single_device",
    "check_plain_gradients",
    "explicit_redistribution",
    "mark_step",
    "sharding_html",
    "sharding_text",
    "visualize_sharding",
    "write_flight_record",
    "write_sharding_image",
]
