"""Boxes and values drawn at random for the tests of tables."""

import torch

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def nested_strides(lengths, draw, widest_gap):
    """Strides of elements that do not overlap, dims nested in random order with gaps between them; and their extent."""
    strides = [1] * len(lengths)
    extent = draw.randint(1, 1 + widest_gap)
    for dim in draw.sample(range(len(lengths)), len(lengths)):
        strides[dim] = extent
        extent = extent * max(lengths[dim], 1) + draw.randint(0, widest_gap)
    return tuple(strides), extent


def repeated_or_backwards(lengths, strides, draw):
    """Strides of which now and then one is 0 or negative, and how far the first element moves for it."""
    shift = 0
    walked = list(strides)
    for dim, length in enumerate(lengths):
        kind = draw.random()
        if kind < 0.1:
            walked[dim] = 0
        elif kind < 0.2:
            shift += max(length - 1, 0) * strides[dim]
            walked[dim] = -strides[dim]
    return shift, tuple(walked)


def random_source(lengths, draw, num_elements):
    """Offset and strides of a box within a source; now and then a dim is repeated or walked backwards."""
    strides, extent = nested_strides(lengths, draw, draw.choice((0, 0, 2)))
    offset = draw.randint(0, num_elements - extent)
    shift, walked = repeated_or_backwards(lengths, strides, draw)
    return offset + shift, walked


def random_bits(num_elements, dtype):
    """Elements of any bits whatever."""
    return torch.randint(0, 256, (num_elements * dtype.itemsize,), dtype=torch.uint8).view(dtype)


def random_floats(num_elements, dtype):
    """Values of every magnitude; one in eight is a zero, a subnormal, an infinity, a NaN or any bits whatever."""
    limits = torch.finfo(dtype)
    special = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), limits.max, limits.tiny]
    special += [limits.smallest_normal / 2, -limits.smallest_normal / 8]
    specials = torch.tensor(special, dtype=torch.float64).to(dtype)[torch.randint(len(special), (num_elements,))]
    values = (torch.randn(num_elements) * 2.0 ** torch.randint(-8, 8, (num_elements,))).to(dtype)
    kind = torch.rand(num_elements)
    return torch.where(kind < 0.1, specials, torch.where(kind < 0.125, random_bits(num_elements, dtype), values))


def bits(x):
    """The elements as integers, so that signs of zeros and kinds of NaN count."""
    return x.view(INTEGERS[x.element_size()])
