"""What an uploaded loss may call: the whole list, by the names that torch.fx records. No torch here: the API checks
graphs against it.

Left out on purpose: whatever changes a tensor in place, is random, runs code or reads files, leaves torch, makes many
objects at once, or costs more than about its operands' size (matrix products, distances, decompositions).
"""

from __future__ import annotations


def _names(text: str, prefix: str = "") -> frozenset[str]:
    return frozenset(prefix + name for name in text.split())


#: Arithmetic of Python, on tensors and on numbers.
OPERATORS = _names(
    """
    add sub mul truediv floordiv mod pow neg pos abs eq ne lt le gt ge and_ or_ xor invert not_ getitem
    """,
    "operator.",
)

#: On numbers only, such as the length of a datum.
MATH = _names("sqrt exp log log2 log10 log1p expm1 floor ceil fabs pow tanh isfinite isinf isnan", "math.")

_ELEMENTWISE = """
    abs absolute neg negative positive sign sgn exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal
    sigmoid logit tanh sin cos tan asin acos atan sinh cosh erf erfc floor ceil round trunc frac relu nan_to_num
    isfinite isnan isinf logical_not add sub subtract mul multiply div divide true_divide floor_divide remainder fmod
    pow minimum maximum fmin fmax eq ne lt le gt ge logical_and logical_or logical_xor bitwise_and bitwise_or
    bitwise_not logaddexp logaddexp2 lerp clamp clip clamp_min clamp_max where masked_fill atan2 hypot xlogy heaviside
    addcmul addcdiv
"""
_REDUCING = """
    sum mean prod std var min max amin amax argmin argmax logsumexp norm any all count_nonzero median nansum nanmean
    nanmedian quantile
"""
_ALONG = """
    cumsum cumprod cummax cummin logcumsumexp softmax log_softmax flip roll sort argsort topk diff gather index_select
    take_along_dim triu tril
"""
_SHAPING = """
    unsqueeze squeeze reshape flatten unflatten transpose permute movedim narrow clone detach numel broadcast_to tile
    repeat_interleave select ravel dot outer isclose
"""
_MAKING = "zeros_like ones_like full_like zeros ones full arange tensor cat concat stack"
_FUNCTIONAL = """
    softplus logsigmoid relu silu gelu tanh sigmoid softmax log_softmax leaky_relu elu huber_loss smooth_l1_loss
    mse_loss l1_loss kl_div binary_cross_entropy binary_cross_entropy_with_logits normalize pad
"""
#: What torch.fx calls some functions of torch.nn.functional, torch.special and torch.linalg.
_BUILT_IN = """
    _nn.log_sigmoid _nn.softplus _nn.gelu _special.special_expm1 _special.special_log1p _special.special_xlogy
    _special.special_logit _special.special_expit _linalg.linalg_norm _linalg.linalg_vector_norm
"""

_SHARED = _ELEMENTWISE + _REDUCING + _ALONG + _SHAPING

FUNCTIONS = (
    OPERATORS
    | MATH
    | {"getattr"}
    | _names(_SHARED + _MAKING, "torch.")
    | _names(_FUNCTIONAL, "torch.nn.functional.")
    | _names(_BUILT_IN, "torch._C.")
)

METHODS = _names(_SHARED) | _names(
    """
    view view_as reshape_as expand expand_as repeat size dim ndimension nelement float double half bfloat16 int long
    bool to type_as t contiguous new_zeros new_ones new_full index_fill
    """
)

#: What `getattr` may read of a tensor, and, the last two, of the result of a reduction along a dimension.
ATTRIBUTES = _names("shape ndim dtype device T mT values indices")

DTYPES = _names("float32 float float64 double float16 half bfloat16 int64 long int32 int int16 short int8 uint8 bool")
