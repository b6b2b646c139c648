"""A call of every operator that lets terms of some reduction pass, and of neighbours that must not, by family."""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F

from tests.ops.terms import Call

aten = torch.ops.aten
INDEX = torch.int64

_DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
)
_FEW_DTYPES = (torch.float16, torch.float64, torch.complex64, torch.int16, torch.bool)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.float64}


def _image(x):
    return x.view(1, 1, 4, 4)


def _rows(w, *shape):
    """Whole indices 0, 1, 2, 3, 0, ... of a shape."""
    return (w(*shape, dtype=INDEX) + 2) % 4


def _mask(w, *shape):
    return w(*shape, dtype=INDEX) > 0


def _each(text: str, make: Callable[[torch.dtype], Call], dtypes: Sequence[torch.dtype]) -> dict[str, Call]:
    return {f"{text} {dtype}": make(dtype) for dtype in dtypes}


def _method(name: str) -> Call:
    return lambda x, w: getattr(x, name)()


def _named(*names: str) -> dict[str, Call]:
    return {name: _method(name) for name in names}


CONVERSIONS: Mapping[str, Call] = {
    **_each("to", lambda dtype: lambda x, w: x.to(dtype), _DTYPES),
    **_each("copy_ to", lambda dtype: lambda x, w: w(4, 4, dtype=dtype).copy_(x), _FEW_DTYPES),
    **_each("cat with", lambda dtype: lambda x, w: torch.cat([x, w(4, 4, dtype=dtype)]), _FEW_DTYPES),
    **_each("add", lambda dtype: lambda x, w: x + w(4, 4, dtype=dtype), _FEW_DTYPES),
    **_each("mul", lambda dtype: lambda x, w: x * w(4, 4, dtype=dtype), _FEW_DTYPES),
    **_each("sum to", lambda dtype: lambda x, w: x.sum(1, dtype=dtype), _FEW_DTYPES),
    **_each("prod to", lambda dtype: lambda x, w: x.prod(1, dtype=dtype), _FEW_DTYPES),
    **_each("cumsum to", lambda dtype: lambda x, w: x.cumsum(1, dtype=dtype), _FEW_DTYPES),
    "view of bits": lambda x, w: x.view(_BITS[x.element_size()]),
}
ELEMENTWISE: Mapping[str, Call] = {
    "neg": lambda x, w: -x,
    "neg_": lambda x, w: x.clone().neg_(),
    "positive": lambda x, w: +x,
    "abs": lambda x, w: x.abs(),
    "relu": lambda x, w: x.relu(),
    "square": lambda x, w: x.square(),
    "sign": lambda x, w: x.sign(),
    **_named("asinh", "atan", "ceil", "deg2rad", "erf", "erfc", "exp", "exp2", "expm1", "floor", "rad2deg", "round"),
    **_named("sigmoid", "sinh", "tanh", "trunc", "nan_to_num", "log", "acos"),
    "minimum": lambda x, w: torch.minimum(w(4, 4), x),
    "maximum of terms": lambda x, w: torch.maximum(x, x.clone()),
    "minimum of terms": lambda x, w: torch.minimum(x.clone(), x),
    "fmax": lambda x, w: torch.fmax(x, w(4, 4)),
    "clamp_min of a tensor": lambda x, w: x.clamp_min(w(4, 4)),
    "clamp_max of a tensor": lambda x, w: x.clone().clamp_max_(w(4, 4)),
    "logaddexp": lambda x, w: torch.logaddexp(x, w(4, 4)),
    "real": lambda x, w: x.real,
    "imag": lambda x, w: x.imag,
    "imag of conj": lambda x, w: x.conj().imag,
    "conj": lambda x, w: x.conj(),
    "conj_physical": lambda x, w: x.conj_physical(),
    "resolve_conj": lambda x, w: x.conj().resolve_conj(),
    "_neg_view": lambda x, w: torch._neg_view(x),
    "view_as_real": lambda x, w: torch.view_as_real(x),
    "view_as_complex": lambda x, w: torch.view_as_complex(x.view(8, 2)),
    "mul by 3": lambda x, w: x * 3,
    "mul by -2": lambda x, w: x * -2,
    "mul by 1.5": lambda x, w: x * 1.5,
    "mul by 2j": lambda x, w: x * 2j,
    "mul_": lambda x, w: x.clone().mul_(w(4, 4)),
    "mul second": lambda x, w: w(4, 4) * x,
    "mul into second": lambda x, w: w(4, 4).mul_(x),
    "square by mul": lambda x, w: x * x,
    "div by 2": lambda x, w: x / 2,
    "div by -3": lambda x, w: x / -3,
    "div": lambda x, w: x / w(4, 4),
    "div of": lambda x, w: w(4, 4) / x,
    "div_": lambda x, w: x.clone().div_(2),
    "div by rounding": lambda x, w: torch.div(x, 2, rounding_mode="floor"),
    "floor_divide": lambda x, w: x // 2,
    "remainder": lambda x, w: x % 3,
    "add": lambda x, w: x + w(4, 4),
    "add_": lambda x, w: x.clone().add_(w(4, 4)),
    "add alpha": lambda x, w: torch.add(x, w(4, 4), alpha=2),
    "add 1": lambda x, w: x + 1,
    "add_ number": lambda x, w: aten.add_.Scalar(x.clone(), 3),
    "add_ 0.5": lambda x, w: aten.add_.Scalar(x.clone(), 0.5),
    "sub": lambda x, w: x - w(4, 4),
    "sub from": lambda x, w: w(4, 4) - x,
    "rsub": lambda x, w: 3 - x,
    "where": lambda x, w: torch.where(_mask(w, 4, 4), x, w(4, 4)),
    "where of": lambda x, w: torch.where(x > 0, w(4, 4), w(4, 4)),
    "lerp": lambda x, w: torch.lerp(x, w(4, 4), 0.25),
    "lerp_": lambda x, w: x.clone().lerp_(w(4, 4), 0.25),
    "lerp by tensor": lambda x, w: torch.lerp(x, w(4, 4), w(4, 4)),
    "complex": lambda x, w: torch.complex(x, w(4, 4)),
    "polar": lambda x, w: torch.polar(x, w(4, 4)),
    "maximum": lambda x, w: torch.maximum(x, w(4, 4)),
    "clamp": lambda x, w: x.clamp(-1, 2),
    "masked_fill 0": lambda x, w: x.masked_fill(_mask(w, 4, 4), 0),
    "masked_fill 2": lambda x, w: x.masked_fill(_mask(w, 4, 4), 2),
    "masked_fill lowest": lambda x, w: x.masked_fill(_mask(w, 4, 4), torch.finfo(x.dtype).min),
    "masked_fill inf": lambda x, w: x.masked_fill(_mask(w, 4, 4), float("-inf")),
    "masked_fill_ 0": lambda x, w: x.clone().masked_fill_(_mask(w, 4, 4), 0),
    "fill_": lambda x, w: x.clone().fill_(3),
    "zero_": lambda x, w: x.clone().zero_(),
    "zeros_like": lambda x, w: torch.zeros_like(x),
    "ones_like": lambda x, w: torch.ones_like(x),
    "detach": lambda x, w: x.detach(),
    "clone": lambda x, w: x.clone(),
    "copy_": lambda x, w: w(4, 4).copy_(x),
    "threshold_backward": lambda x, w: aten.threshold_backward(x, w(4, 4), 0),
    "sigmoid_backward": lambda x, w: aten.sigmoid_backward(x, w(4, 4)),
    "prelu_backward": lambda x, w: aten._prelu_kernel_backward(x, w(4, 4), w(4, 4)),
    # Nothing is drawn that matters.
    "dropout of all": lambda x, w: torch.native_dropout(x, 1.0, True),
    "dropout of none": lambda x, w: torch.native_dropout(x, 0.0, True),
    "native_dropout_backward": lambda x, w: aten.native_dropout_backward(x, _mask(w, 4, 4), 2.0),
    "_foreach_mul": lambda x, w: torch._foreach_mul([x, w(4)], [w(4, 4), w(4)]),
    "_foreach_mul 1.5": lambda x, w: torch._foreach_mul([x], 1.5),
    "_foreach_mul second": lambda x, w: torch._foreach_mul([w(4, 4)], [x]),
    "_foreach_div 2": lambda x, w: torch._foreach_div([x], 2),
    "_foreach_add": lambda x, w: torch._foreach_add([x], [w(4, 4)], alpha=3),
    "_foreach_add 1": lambda x, w: torch._foreach_add([x], 1),
    "_foreach_sub": lambda x, w: torch._foreach_sub([x], [w(4, 4)]),
    "_foreach_neg": lambda x, w: torch._foreach_neg([x]),
    "_foreach_abs": lambda x, w: torch._foreach_abs([x]),
    "_foreach_lerp": lambda x, w: torch._foreach_lerp([x], [w(4, 4)], 0.25),
    "_foreach_copy_ to half": lambda x, w: _copied([w(4, 4, dtype=torch.float16)], [x]),
    "_foreach_copy_ to double": lambda x, w: _copied([w(4, 4, dtype=torch.float64)], [x]),
    "_foreach_maximum": lambda x, w: torch._foreach_maximum([x], [w(4, 4)]),
}


def _copied(into, source):
    torch._foreach_copy_(into, source)
    return into


ARRANGED: Mapping[str, Call] = {
    "view": lambda x, w: x.view(2, 8),
    "t": lambda x, w: x.t(),
    "permute": lambda x, w: x.permute(1, 0),
    "unsqueeze": lambda x, w: x.unsqueeze(1).squeeze(1),
    "expand": lambda x, w: x.expand(2, 4, 4),
    "select": lambda x, w: x[1],
    "slice": lambda x, w: x[:, 1:3],
    "split": lambda x, w: x.split(3),
    "unbind": lambda x, w: x.unbind(1),
    "diagonal": lambda x, w: x.diagonal(),
    "unfold": lambda x, w: x.unfold(1, 2, 1),
    "repeat": lambda x, w: x.repeat(2, 1),
    "pad 0": lambda x, w: F.pad(x, (1, 2)),
    "pad 2": lambda x, w: F.pad(x, (1, 2), value=2),
    "flip": lambda x, w: x.flip(0),
    "roll": lambda x, w: x.roll(1, 0),
    "rot90": lambda x, w: x.rot90(),
    "cat": lambda x, w: torch.cat([x, w(2, 4)]),
    "stack": lambda x, w: torch.stack([w(4, 4), x]),
    "tril": lambda x, w: x.tril(),
    "triu": lambda x, w: x.triu(1),
    "diag_embed": lambda x, w: torch.diag_embed(x),
    "diagonal_scatter": lambda x, w: torch.diagonal_scatter(x, w(4)),
    "select_scatter": lambda x, w: torch.select_scatter(x, w(4), 0, 1),
    "slice_scatter": lambda x, w: torch.slice_scatter(x, w(2, 4), 0, 1, 3),
    "select_backward": lambda x, w: aten.select_backward(x, [4, 3, 4], 1, 2),
    "slice_backward": lambda x, w: aten.slice_backward(x, [9, 4], 0, 0, 8, 2),
    "diagonal_backward": lambda x, w: aten.diagonal_backward(x, [4, 4, 4], 0, 1, 2),
    "unfold_backward": lambda x, w: aten.unfold_backward(x, [5], 0, 4, 1) if x.dim() == 2 else x,
    "gather": lambda x, w: x.gather(1, _rows(w, 4, 4)),
    "index_select": lambda x, w: x.index_select(0, _rows(w, 4)),
    "index": lambda x, w: x[_rows(w, 3)],
    "take": lambda x, w: x.take(_rows(w, 3)),
    "embedding": lambda x, w: F.embedding(_rows(w, 3), x),
    "pixel_shuffle": lambda x, w: F.pixel_shuffle(x.view(1, 4, 2, 2), 2),
    "channel_shuffle": lambda x, w: F.channel_shuffle(x.view(1, 4, 2, 2), 2),
    "im2col": lambda x, w: F.unfold(_image(x), 2),
    "reflection_pad2d": lambda x, w: F.pad(_image(x), (1, 1, 1, 1), "reflect"),
    "replication_pad2d": lambda x, w: F.pad(_image(x), (1, 1, 1, 1), "replicate"),
    "new_zeros": lambda x, w: x.new_zeros(4, 4),
    "index_fill": lambda x, w: x.index_fill(0, _rows(w, 2), 0),
    "index_copy": lambda x, w: x.index_copy(0, _rows(w, 2), w(2, 4)),
    "sort": lambda x, w: x.sort(1)[0],
}
REDUCTIONS: Mapping[str, Call] = {
    "sum": lambda x, w: x.sum(),
    "sum of rows": lambda x, w: x.sum(1),
    "mean": lambda x, w: x.mean(1),
    "prod": lambda x, w: x.prod(1),
    "amax": lambda x, w: x.amax(1),
    "amin": lambda x, w: x.amin(1),
    "max": lambda x, w: x.max(),
    "min": lambda x, w: x.min(),
    "any": lambda x, w: x.any(1),
    "all": lambda x, w: x.all(),
    "count_nonzero": lambda x, w: x.count_nonzero(),
    "cumsum": lambda x, w: x.cumsum(1),
    "cumprod": lambda x, w: x.cumprod(1),
    "trace": lambda x, w: x.trace(),
    "norm": lambda x, w: torch.linalg.vector_norm(x),
    "logsumexp": lambda x, w: x.logsumexp(1),
    "cummax": lambda x, w: x.cummax(1)[0],
    "index_add": lambda x, w: w(4, 4).index_add(0, _rows(w, 4), x),
    "index_add into": lambda x, w: x.index_add(0, _rows(w, 4), w(4, 4), alpha=2),
    "scatter_add": lambda x, w: w(4, 4).scatter_add(0, _rows(w, 4, 4), x),
    "index_put": lambda x, w: w(4, 4).index_put((_rows(w, 4),), x, accumulate=True),
    "index_put without": lambda x, w: w(4, 4).index_put((_rows(w, 4),), x),
    "scatter": lambda x, w: w(4, 4).scatter(0, _rows(w, 4, 4), x),
    "mm": lambda x, w: x @ w(4, 3),
    "mm second": lambda x, w: w(3, 4) @ x,
    "bmm": lambda x, w: torch.bmm(x.view(1, 4, 4), w(1, 4, 2)),
    "mv": lambda x, w: x.mv(w(4)),
    "dot": lambda x, w: x[0].dot(w(4)),
    "vdot": lambda x, w: torch.vdot(x[0], w(4)),
    "addmm": lambda x, w: torch.addmm(w(3), x, w(4, 3)),
    "addmm to": lambda x, w: torch.addmm(x, w(4, 2), w(2, 4), beta=2),
    "baddbmm": lambda x, w: torch.baddbmm(w(1, 4, 2), x.view(1, 4, 4), w(1, 4, 2)),
    "addmv": lambda x, w: torch.addmv(w(4), x, w(4)),
    "addr": lambda x, w: torch.addr(w(4, 4), x[0], w(4)),
    "linear": lambda x, w: F.linear(x, w(3, 4), w(3)),
    "linear without bias": lambda x, w: F.linear(x, w(3, 4)),
    "mm of itself": lambda x, w: x @ x,
    "linalg_cross": lambda x, w: torch.linalg.cross(x[:, :3], w(4, 3)),
    "trilinear": lambda x, w: F.bilinear(x, w(4, 2), w(3, 4, 2)),
}
MODULES: Mapping[str, Call] = {
    "avg_pool2d": lambda x, w: F.avg_pool2d(_image(x), 2),
    "adaptive_avg_pool2d": lambda x, w: F.adaptive_avg_pool2d(_image(x), 3),
    "avg_pool2d_backward": lambda x, w: aten.avg_pool2d_backward(
        _image(x), w(1, 1, 8, 8), [2, 2], [2, 2], [0, 0], False, True, None
    ),
    "max_pool2d": lambda x, w: F.max_pool2d(_image(x), 2),
    "reflection_pad2d_backward": lambda x, w: aten.reflection_pad2d_backward(_image(x), w(1, 1, 2, 2), [1, 1, 1, 1]),
    "col2im": lambda x, w: F.fold(x.view(1, 4, 4), (3, 3), 2),
    "upsample_nearest2d": lambda x, w: F.interpolate(_image(x), scale_factor=2),
    "upsample_bilinear2d": lambda x, w: F.interpolate(_image(x), size=(5, 7), mode="bilinear"),
    "upsample_bilinear2d_backward": lambda x, w: aten.upsample_bilinear2d_backward(
        _image(x), [4, 4], [1, 1, 2, 2], False
    ),
    "grid_sampler_2d": lambda x, w: F.grid_sample(_image(x), w(1, 3, 3, 2), align_corners=False),
    "conv2d": lambda x, w: F.conv2d(_image(x), w(2, 1, 2, 2), w(2)),
    "conv2d of weight": lambda x, w: F.conv2d(w(1, 1, 5, 5), _image(x)),
    "convolution_backward": lambda x, w: aten.convolution_backward(
        _image(x), w(1, 2, 5, 5), w(1, 2, 2, 2), [1], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, True]
    ),
    "glu": lambda x, w: F.glu(x),
    "glu_backward": lambda x, w: aten.glu_backward(x, w(4, 8), 1),
    "softmax": lambda x, w: x.softmax(1),
    "softmax_backward": lambda x, w: aten._softmax_backward_data(x, w(4, 4), 1, x.dtype),
    "log_softmax_backward": lambda x, w: aten._log_softmax_backward_data(x, w(4, 4), 1, x.dtype),
    "layer_norm": lambda x, w: F.layer_norm(x, (4,)),
    "layer_norm_backward": lambda x, w: aten.native_layer_norm_backward(
        x, w(4, 4), [4], w(4, 1), w(4, 1), w(4), w(4), [True, True, True]
    ),
    "group_norm_backward": lambda x, w: aten.native_group_norm_backward(
        x.view(2, 2, 4), w(2, 2, 4), w(2, 1), w(2, 1), w(2), 2, 2, 4, 1, [True, True, True]
    ),
    "batch_norm_backward": lambda x, w: aten.native_batch_norm_backward(
        x, w(4, 4), w(4), w(4), w(4).abs(), w(4), w(4).abs(), False, 1e-5, [True, True, True]
    ),
    "embedding_dense_backward": lambda x, w: aten.embedding_dense_backward(x, _rows(w, 4), 5, -1, False),
    "embedding_dense_backward scaled": lambda x, w: aten.embedding_dense_backward(x, _rows(w, 4), 5, -1, True),
    "solve_triangular": lambda x, w: torch.linalg.solve_triangular(w(4, 4), x, upper=True),
    "solve of": lambda x, w: torch.linalg.solve_triangular(x, w(4, 2), upper=True),
    "fft": lambda x, w: torch.fft.fft(x),
    "rfft": lambda x, w: torch.fft.rfft(x),
    "irfft": lambda x, w: torch.fft.irfft(x),
    "cdist": lambda x, w: torch.cdist(x, w(3, 4)),
    "mse_loss": lambda x, w: F.mse_loss(x, w(4, 4)),
    "histc": lambda x, w: torch.histc(x, 4, -1, 1),
}
CALLS: Mapping[str, Call] = {**CONVERSIONS, **ELEMENTWISE, **ARRANGED, **REDUCTIONS, **MODULES}
