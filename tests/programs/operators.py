"""The operators of random programs, by kind, as templates whose fields `draw.Draw` fills.

`-> 2` behind a template is the number of its results, where that is not one. Kinds are the names by which statements
are left out (`--without`), and say how much of their arithmetic is exact (one_device.py).
"""

from collections.abc import Mapping, Sequence


def _templates(text: str) -> Sequence[str]:
    """The templates of a text, which are separated by semicolons."""
    return tuple(" ".join(template.split()) for template in text.split(" ;"))


# What gives new tensors.
PURE: Mapping[str, Sequence[str]] = {
    "pointwise": _templates("""
        {x:fic}.abs() ; -{x:fic} ; {x:fi}.relu() ; {x:fic}.square() ; {x:fi}.sign() ; {x:fibc} + {y} ;
        {x:fic} - {y} ; {x:fibc} * {y} ; torch.add({x:fic}, {y}, alpha={n}) ; torch.maximum({x:fib}, {y}) ;
        torch.minimum({x:fib}, {y}) ; {x:fi}.clamp({n}, {m}) ; torch.where({x:b}, {u}, {w}) ; {x:fi} // {n} ;
        torch.where({x:fi} > 0, {x}, {z}) ; torch.addcmul({x:fc}, {y}, {z}, value={n}) ; {x:fic} + {n} ;
        {n} - {x:fic} ; {x:fic} * {n} ; {x:ib} & {y:ib} ; {x:ib} | {y:ib} ; {x:ib} ^ {y:ib} ; ~{x:ib} ;
        {x:fi} % {k} ; {x:fi}.fmod({k}) ; {x:fi}.clamp_min({n}) ; {x:fi}.floor() ; {x:fi}.trunc() ; {x:fi}.pow(2) ;
        F.relu6({x:fi}) ; F.hardtanh({x:f}) ; F.leaky_relu({x:f}, 2) ; torch.rsub({x:fic}, {n}) ; {x:c}.conj() ;
        {x:fi} * 1j ; {x:c}.conj() * {y} ; F.threshold({x:f}, 1, {n}) ; torch.complex({x:d}, {z:d}) ;
        {x:fibc} * True ; {x:fib}.nan_to_num() ; torch.heaviside({x:d}, {y:d}) ; torch.square({x:c}).real
    """),
    "compare": _templates("""
        {x:fib} > {y} ; {x:fibc} == {y} ; {x:fib}.ge({n}) ; {x:fibc} != {n} ; torch.logical_and({x:fib}, {y}) ;
        {x:fibc}.isnan() ; torch.signbit({x:fi} + 0) ; torch.logical_not({x:fib}) ; torch.isclose({x:f}, {z}) ;
        torch.isin({x:fi}, {y}) ; {x:fi}.lt({y}) | {x}.gt(1)
    """),
    "smooth": _templates("""
        ({x:f} / 4).exp() ; {x:fib}.sigmoid() ; {x:f}.tanh() ; {x:fi}.sin() ; {x:fic} / {n} ; {x:f}.abs().sqrt() ;
        {x:fic} / ({y}.abs() + 1) ; {x:f}.abs().log1p() ; F.gelu({x:f}) ; F.silu({x:f}) ; F.softplus({x:f}) ;
        ({x:f}.abs() + 1).rsqrt() ; torch.atan2({x:f} + 0, {y} + 0) ; {x:fi}.erf() ; torch.lerp({x:f}, {z}, 0.25) ;
        torch.hypot({x:f}, {y:f}) ; F.elu({x:f}) ; torch.logaddexp({x:f}, {y:f}) ; {x:c}.abs() ;
        {x:f}.pow(1.5).nan_to_num() ; torch.addcdiv({x:f}, {y}, {z}.abs() + 1) ; {x:c}.exp() ; F.hardswish({x:f}) ;
        ({x:c} + 0).contiguous().angle()
    """),
    "cast": _templates("""
        {x:fibc}.to({dtype}) ; {x:fibc}.double() ; {x:fib}.long() ; {x:fibc}.bool() ; {x:fi}.to(torch.int8) ;
        {x:fib}.to(torch.complex64) ; {x:fib}.type_as({u:fi}) ; {x:f}.to(torch.bfloat16) ; {x:f}.half().float()
    """),
    "reduction": _templates("""
        {x:fibc1}.sum({d}, keepdim={flag}) ; {x:fibc}.sum() ; {x:fib1}.sum({ds}, keepdim={flag}) ;
        {x:fi1}.amax({ds}) ; {x:fib1}.amin({d}, {flag}) ; {x:fib}.any() ; {x:fib1}.all({d}) ; {x:fi}.max() ;
        {x:fib}.count_nonzero() ; {x:fi1}.max({d}) -> 2 ; {x:fi1}.min({d}, keepdim={flag}) -> 2 ; {x:fi}.argmax() ;
        {x:fi1}.argmin({d}) ; {x:f1}.nansum({d}) ; torch.aminmax({x:fi}) -> 2 ; {x:i1}.prod({d}) ; {x:fi}.min() ;
        {x:b1}.sum({d}, dtype={dtype}) ; {x:f1}.sum({d}, dtype=torch.float64) ; torch.trace({x:fi2})
    """),
    "statistics": _templates("""
        {x:fc1}.mean({d}, keepdim={flag}) ; {x:f}.mean() ; {x:f1}.var({d}, correction=0) ; {x:f1}.std({d}) ;
        {x:f}.norm() ; torch.linalg.vector_norm({x:fc1}, dim={d}) ; {x:f1}.logsumexp({d}) ; {x:f1}.norm(1, dim={d}) ;
        torch.var_mean({x:f1}, {d}) -> 2 ; {x:f1}.norm(float('inf'), dim={d}) ; {x:f1}.nanmean({d}) ;
        torch.cdist({x:d2}, {rows}) ; torch.dist({x:f}, {z}) ; torch.renorm({x:f2}, 2, {d}, 3.0)
    """),
    "matmul": _templates("""
        {x:fic1} @ {matrix} ; {rows} @ {x:fic2}.mT ; {x:fic3} @ {batch} ; {x:fic1} @ {vector} ;
        F.linear({x:fc1}, {rows}) ; torch.outer({x:fi1}.flatten(), {u:fi1}.flatten()[:5].to({x}.dtype)) ;
        torch.einsum('...i,...i->...', {x:f1}, {y:f}) ; torch.tensordot({x:fi1}, {matrix}, 1) ; {x:f2}.mT @ {x} ;
        torch.einsum('...ij->...ji', {x:fc2}) ; torch.addmm({n} * {x:d2}[:1, :1], {x}, {matrix}, alpha={m}) ;
        torch.kron({x:fi}, {u:fi1}.flatten()[:2].to({x}.dtype)) ; torch.linalg.multi_dot([{x:d2}, {matrix}]) ;
        torch.inner({x:fi1}, {rows}) ; torch.vdot({x:c1}.flatten(), {z}.flatten()) ;
        torch.linalg.matrix_power({x:d2} @ {x}.mT, 2) ; torch.linalg.cross({x:f}, {z}) ;
        F.bilinear({x:d2}, {z}, {z}[None, :2, :1])
    """),
    "view": _templates("""
        {x:fibc2}.transpose({d}, {e}) ; {x:fibc2}.mT ; {x:fibc}.permute({perm}) ; {x:fibc}.reshape({shape}) ;
        {x:fibc}.view({shape}) ; {x:fibc}.flatten() ; {x:fibc1}.unflatten({d}, {split}) ; {x:fibc}.squeeze() ;
        {x:fibc1}.squeeze({d}) ; {x:fibc1}.unsqueeze({d}) ; {x:fibc}.expand({bigger}) ; {x:fibc1}.select({d}, {i}) ;
        {x:fibc1}.narrow({d}, {lo}, {rest}) ; {x:fibc1}.split({k}, {d})[0] ; {x:fibc1}.chunk(2, {d})[-1] ;
        {x:fibc1}.unbind({d})[0] ; {x:fibc1}.movedim({d}, {e}) ; {x:fibc2}.diagonal({off}, 0, 1) ;
        {x:fi1}.unfold({d}, {k}, {k}) ; {x:c}.real ; {x:c}.imag ; torch.view_as_real({x:c}) ; {x:fibc}[{index}] ;
        {x:fibc}[{index}] ; {x:fib2}.T ; {x:fibc1}.swapaxes({d}, 0) ; torch.tensor_split({x:fibc1}, 2, {d})[0] ;
        {x:fibc1}.flatten({d}, -1) ; {x:fib}.view_as({x}) ; {x:fib}.detach() ; torch.atleast_2d({x:fib}) ;
        {x:fib1}.split([{k}, {x}.shape[{d}] - {k}], {d})[-1] ; {x:fibc1}[::2] ; {x:fibc1}[..., -1] ;
        {x:fibc2}[:, 1:] ; {x:fibc2}[1:, :-1]
    """),
    "copy": _templates("""
        {x:fibc}.clone() ; {x:fibc}.contiguous() ; {x:fibc}.flip({ds}) ; {x:fibc1}.roll({n}, {d}) ;
        {x:fi2}.triu({off}) ; {x:fibc}.repeat({repeats}) ; {x:fibc2}.tril({off}) ; torch.rot90({x:fib2}) ;
        {x:fib1}.repeat_interleave({k}, {d}) ; F.pad({x:fic1}, (1, 2)) ; F.pad({x:f2}, (0, 1, 1, 0), value={n}) ;
        F.pad({x:f3}, (1, 1), mode='reflect') ; {x:fib}.tile({repeats}) ; torch.diag_embed({x:fi1}) ;
        torch.diff({x:fic1}, dim={d}) ; F.pad({x:fi1}, (-1, 1)) ;
        {x:fibc}.clone(memory_format=torch.contiguous_format) ; torch.roll({x:fib}, {n}) ;
        torch.block_diag({x:fi2}, {z})
    """),
    "index": _templates("""
        {x:fibc1}.index_select({d}, {places}) ; {x:fib1}.gather({d}, {index_like}) ;
        torch.take({x:fi1}, {u:l}.abs() % {x}.numel()) ; {x:fi1}.index_fill({d}, {places}, {n}) ;
        {x:fic1}.index_add({d}, {places}, {part}) ; {x:fi1}.scatter({d}, {index_like}, {n}) ;
        {x:fi1}.scatter_add({d}, {index_like}, {z}) ; {x:fibc}.masked_fill({mask}, {n}) ;
        F.embedding({u:l}.abs() % {x:f2}.shape[0], {x}) ; {x:fi1}.index_copy({d}, {places} * 0, {part}) ;
        torch.take_along_dim({x:fi1}, {index_like}, {d}) ; F.one_hot({x:l}.abs() % 5, 5) ;
        {x:fi1}.scatter_reduce({d}, {index_like}, {z}, 'amax') ;
        {x:fibc1}.select_scatter({x}.select({d}, {i}), {d}, {i}) ;
        torch.index_put({x:fi1}, [{mask}], {x}.new_zeros(())) ;
        {x:fib1}.slice_scatter({x}.narrow({d}, {lo}, {rest}), {d}, {lo}, {lo} + {rest}) ;
        {x:fi}.masked_scatter({mask}, {z})
    """),
    # Values tell the shape of the result.
    "dynamic": _templates("""
        {x:fi}.masked_select({mask}) ; {x:fib}[{mask}] ; {x:fib}.nonzero() ; torch.unique({x:fib}) ;
        torch.bincount({x:l}.flatten().abs()) ; {x:fibc1}[{index:b}]
    """),
    "join": _templates("""
        torch.cat([{x:fibc1}, {beside}], {d}) ; torch.stack([{x:fibc}, {z}]) ; torch.stack([{x:fibc1}, {z}], {d}) ;
        torch.cat([{x:fib1}, {z:fi}], {d}) ; torch.hstack([{x:fib}, {x}]) ;
        torch.cat([{x:fi1}, {beside}, {x}], {d}) ; torch.vstack([{x:fib}, {z}]) ;
        torch.column_stack([{x:fib}, {z}]) ; torch.broadcast_tensors({x:fib}, {y})[0] + 0 ;
        torch.meshgrid({x:fi1}.flatten(), {u:fi1}.flatten()[:3].to({x}.dtype), indexing='ij')[1] ;
        torch.cartesian_prod({x:i1}.flatten()[:4], {u:i1}.flatten()[:3].to({x}.dtype))
    """),
    "norm": _templates("""
        F.layer_norm({x:d1}, {x}.shape[-1:], {vector}, {vector2}) ; F.rms_norm({x:d1}, {x}.shape[-1:]) ;
        F.normalize({x:d1} + 0.5, dim={d}) ; F.group_norm({x:d3}, 1) ;
        F.batch_norm({x:d2}, None, None, training=True) ; F.instance_norm({x:d3}) ; F.local_response_norm({x:d3}, 2)
    """),
    "softmax": _templates("""
        torch.softmax({x:f1}, {d}) ; F.log_softmax({x:f1}, {d}) ; F.softmin({x:f1}, {d}) ;
        torch.softmax({x:f1}, {d}, dtype=torch.float64) ; F.glu(torch.cat([{x:f1}, {x}], {d}), {d}) ;
        torch.logcumsumexp({x:f1}, {d})
    """),
    "loss": _templates("""
        F.mse_loss({x:f}, {z}) ; F.l1_loss({x:f}, {z}, reduction='sum') ; F.cross_entropy({x:f2}, {classes}) ;
        F.nll_loss({x:d2}, {classes}) ; F.binary_cross_entropy_with_logits({x:f}, ({z} > 0).to({x}.dtype)) ;
        F.kl_div({x:d1}, torch.softmax({z}, -1), reduction='batchmean') ; F.smooth_l1_loss({x:f}, {z}) ;
        F.cosine_similarity({x:d1}, {z}, {d}) ;
        F.cross_entropy({x:f2}, {classes}, label_smoothing=0.1, reduction='none') ;
        F.huber_loss({x:f}, {z}, reduction='none') ; F.soft_margin_loss({x:d}, {z}.sign()) ;
        F.hinge_embedding_loss({x:d}, {z}.sign())
    """),
    "cumulative": _templates("""
        {x:fic1}.cumsum({d}) ; {x:i1}.cumprod({d}) ; {x:fi1}.cummax({d}) -> 2 ; {x:fi1}.cummin({d})[0] ;
        {x:fib1}.cumsum({d}, dtype=torch.float64)
    """),
    "sort": _templates("""
        {x:fib1}.sort({d}, stable=True) -> 2 ; {x:fi1}.sort({d}, descending={flag})[0] ;
        torch.argsort({x:fi1}, {d}, stable=True) ; {x:fi1}.topk(1, {d})[0] ; {x:fi1}.kthvalue(1, {d})[0] ;
        {x:fi}.median() ; {x:fi1}.contiguous().median({d})[0] ;
        torch.searchsorted({x:fi1}.flatten().sort()[0], {z}) ; torch.msort({x:fi1}) ; {x:fi1}.mode({d})[0] ;
        torch.bucketize({x:fi}, {x}.flatten().sort()[0])
    """),
    "conv": _templates("""
        F.conv1d({x:f3}, {kernel}) ; F.conv1d({x:d3}, {kernel}, padding=1, stride=2) ; F.max_pool1d({x:f3}, 2) ;
        F.avg_pool1d({x:d3}, 2) ; F.interpolate({x:d3}, scale_factor=2) ; F.adaptive_avg_pool1d({x:d3}, 2) ;
        F.conv_transpose1d({x:d3}, {kernel}.transpose(0, 1)[:, :2])
    """),
    # Out of distributed tensors and back into them, gradients too.
    "to_local": _templates("place.through_local({x:fibc})"),
    "full_tensor": _templates("place.through_whole({x:fibc})"),
    "from_local": _templates("place.through_columns({x:fibc2})"),
    "factory": _templates("""
        torch.zeros_like({x:fibc}) ; torch.ones_like({x:fib}, dtype={dtype}) ; torch.full_like({x:fi}, {n}) ;
        {x:fib}.new_zeros(3, 2) ; {x:fi}.new_full((4,), {n})
    """),
}  # fmt: skip

# What writes to tensors that are there; {x} comes first.
WRITING: Mapping[str, Sequence[str]] = {
    "write": _templates("""
        {x:fic}.add_({y}) ; {x:fic}.sub_({z}, alpha={n}) ; {x:fibc}.mul_({y}) ; {x:fi}.relu_() ;
        {x:fi}.clamp_({n}, 3) ; {x:fibc}.zero_() ; {x:fibc}.fill_({n}) ; {x:fibc}.copy_({y}) ;
        {x:fibc}.copy_({z:fi}) ; {x:fibc}.masked_fill_({mask}, {n}) ; {x:fic1}.index_add_({d}, {places}, {part}) ;
        {x:fi1}.index_fill_({d}, {places}, {n}) ; {x:fi1}.scatter_({d}, {index_like}, {n}) ; {x:fi2}.triu_() ;
        {x:fic}.neg_() ; {x:fic} += {n} ; {x:fi1}.cumsum_({d}) ; {x:fi} -= {y} ; {x:fb}.logical_not_() ;
        {x:fc}.addcmul_({y}, {z}) ; {x:fi}.fill_({u:fi}.flatten()[0]) ; {x:fib1}.select({d}, {i}).fill_({n}) ;
        {x:fic1}.narrow({d}, {lo}, {rest}).add_({n}) ; {x:fi1}.scatter_add_({d}, {index_like}, {z}) ;
        {x:fi2}.diagonal().zero_() ; {x:fi2}.mT().mul_({n}) ; {x:fic}.view(-1).add_({n}) ;
        {x:fi1}.unsqueeze({d}).sub_({n}) ; {x:fi2}.fill_diagonal_({n}) ; {x:f2}.addmm_({z}.clone(), {z}.mT @ {x}) ;
        {x:fi}.random_(1) ; {x:fi1}.index_copy_({d}, {places} * 0, {part})
    """),
    "smooth_write": _templates("""
        {x:f}.div_({y}.abs() + 1) ; {x:f}.sigmoid_() ; {x:f}.tanh_() ; {x:f}.lerp_({z}, 0.5) ; {x:f}.abs_().sqrt_()
    """),
    "setitem": _templates("""
        {x:fibc}[{index:b}] = {n} ; {x:fi}[{index}] += {n} ; {x:fi1}[{index:b}] = {u:fi}.flatten()[:1].sum() ;
        {x:fibc}[{mask}] = {n} ; {x:fi1}[..., :1] = {z}[..., :1]
    """),
    "foreach": _templates("""
        torch._foreach_add_([{x:fi}, {u:fi}], {n}) ; torch._foreach_mul_([{x:fi}, {u:fi}], {m}) ;
        torch._foreach_add_([{x:f}], [{z}], alpha={n}) ; torch._foreach_zero_([{x:fi}, {u:fi}]) ;
        torch._foreach_copy_([{x:fi}], [{z}]) ; torch._foreach_neg_([{x:fi}, {u:fi}]) ;
        torch._foreach_mul_([{x:f}, {u:f}], [{n}, {m}]) ; torch._foreach_addcmul_([{x:f}], [{z}], [{zz}]) ;
        torch._foreach_clamp_min_([{x:fi}], {n})
    """),
    "out": _templates("""
        torch.add({x:fic}, {y}, out={z}) ; torch.mul({x:fi}, {n}, out={z}) ; torch.maximum({x:fi}, {z}, out={zz}) ;
        torch.mm({x:f2}, {x}.mT, out={x}.new_zeros(({x}.shape[0],) * 2)) ; torch.clamp({x:fi}, 0, 1, out={x})
    """),
    "shape_out": _templates("""
        torch.add({x:fi}, {n}, out={u:fi}) ; torch.neg({x:fi}, out={u:fi})
    """),
    "data": _templates("""
        {x:fi}.data.add_({n}) ; {x:fi}.data[{index}] = {n} ; {x:fi}.data.copy_({z}) ; {x:fi}.detach().mul_({n})
    """),
    "set_data": _templates("""
        {x:fi}.data = {z}.detach().clone()
    """),
    "reshape_in_place": _templates("""
        {x:fi2}.transpose_({d}, {e}) ; {x:fib2}.t_() ; {x:fib1}.squeeze_({d}) ; {x:fib1}.unsqueeze_({d}) ;
        {x:fib1}.squeeze_() ; {x:fib1}.swapaxes_({d}, 0)
    """),
    "requires_grad": _templates("""
        {x:f}.requires_grad_() ; {x:f}.detach_()
    """),
}  # fmt: skip
