"""What an uploaded loss may call, and with which arguments: the whole list, by the names that torch.fx records. No
torch here: the API checks graphs against it.

Each line of the list says how the size of a result follows from the operands (`custom_rules`), what may be
given, and which operations it is about. An operation with several lines takes any of their forms. A form that is not
here is refused, so nothing is possible whose cost is not known, such as a nuclear norm.

Left out on purpose: whatever changes a tensor in place, is random, runs code or reads files, leaves torch, makes many
objects at once, or costs more than about its operands' size (matrix products, distances, decompositions).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Parameter:
    """`kinds` are letters, any of which may be given:

    x a tensor · n a number · i an integer that is known · b a truth value · t a dtype · s a text · d a dimension or
    several · S sizes, as a tuple or one by one · L tensors · N numbers, nested · o the order of a norm of all elements
    """

    name: str
    kinds: str
    optional: bool
    by_name: bool


@dataclass(frozen=True)
class Form:
    """One way to call an operation. `cost` is the cost of one element, relative to an addition's."""

    rule: str
    parameters: tuple[Parameter, ...]
    cost: int


#: rule, cost: parameters: operations. `?` marks optional parameters; those after `*` are given by name only.
_SHARED = """
each 1: input:x: abs absolute neg negative positive sign sgn relu ceil floor trunc frac
counts 1: input:x: square
floats 1: input:x: reciprocal sqrt
floats 4: input:x: exp exp2 expm1 log log2 log10 log1p rsqrt sigmoid tanh sin cos tan asin acos atan sinh cosh erf erfc
floats 4: input:x eps:n?: logit
each 1: input:x * decimals:i?: round
each 1: input:x nan:n? posinf:n? neginf:n?: nan_to_num
flags 1: input:x: isfinite isnan isinf logical_not
each 1: input:x: bitwise_not
each 1: input:x other:xn * alpha:n?: add sub subtract
each 1: input:x other:xn: mul multiply
floats 1: input:x other:xn: true_divide
each 1: input:x other:xn * rounding_mode:s: div divide
floats 1: input:x other:xn: div divide
each 4: input:x other:xn: floor_divide remainder fmod
each 4: input:xn exponent:xn: pow
each 1: input:x other:x: minimum maximum fmin fmax
flags 1: input:x other:xn: eq ne lt le gt ge logical_and logical_or logical_xor
each 1: input:x other:xn: bitwise_and bitwise_or bitwise_xor
floats 4: input:x other:x: logaddexp logaddexp2 atan2 hypot
floats 4: input:xn other:xn: xlogy
each 1: input:x values:x: heaviside
each 1: input:x end:x weight:xn: lerp
each 1: input:x min:xn? max:xn?: clamp clip
each 1: input:x min:xn: clamp_min
each 1: input:x max:xn: clamp_max
filled 1: input:x mask:x value:xn: masked_fill
each 1: input:x tensor1:x tensor2:x * value:n?: addcmul addcdiv
flags 1: input:x other:x rtol:n? atol:n? equal_nan:b?: isclose
reduced 1: input:x dim:d? keepdim:b? * dtype:t?: sum prod nansum
reduced_floats 1: input:x dim:d? keepdim:b? * dtype:t?: mean nanmean
reduced_floats 2: input:x dim:d? unbiased:b? keepdim:b? * correction:n?: std var
extreme 1: input:x dim:d? keepdim:b?: amin amax
reduced_floats 4: input:x dim:d keepdim:b?: logsumexp
reduced_flags 1: input:x dim:d? keepdim:b?: any all
reduced_places 1: input:x dim:d?: count_nonzero
reduced_places 2: input:x dim:i? keepdim:b?: argmin argmax
reduced_floats 4: input:x p:o? dim:d? keepdim:b? dtype:t?: norm
reduced_floats 16: input:x q:n dim:i? keepdim:b? * interpolation:s?: quantile
each 1: input:x other:x: min max
extreme 1: input:x: min max
chosen 2: input:x dim:i keepdim:b?: min max
reduced 16: input:x: median nanmedian
chosen 16: input:x dim:i keepdim:b?: median nanmedian
along 8: input:x dim:i * dtype:t?: cumsum cumprod
along 16: input:x dim:i: logcumsumexp
pair 8: input:x dim:i: cummax cummin
along_floats 4: input:x dim:i dtype:t?: softmax log_softmax
each 2: input:x dims:S: flip
each 2: input:x shifts:S dims:S?: roll
pair 16: input:x dim:i? descending:b? * stable:b?: sort
places 16: input:x dim:i? descending:b? stable:b?: argsort
topk 16: input:x k:i dim:i? largest:b? sorted:b?: topk
diff 2: input:x n:i? dim:i?: diff
gather 8: input:x dim:i index:x: gather
index_select 8: input:x dim:i index:x: index_select
take_along 8: input:x indices:x dim:i?: take_along_dim
each 1: input:x diagonal:i?: triu tril
unsqueeze 1: input:x dim:i: unsqueeze
squeeze 1: input:x dim:d?: squeeze
reshape 1: input:x shape:S: reshape
flatten 1: input:x start_dim:i? end_dim:i?: flatten ravel
unflatten 1: input:x dim:i sizes:S: unflatten
transpose 1: input:x dim0:i dim1:i: transpose
permute 1: input:x dims:S: permute
movedim 1: input:x source:i destination:i: movedim
narrow 1: input:x dim:i start:i length:i: narrow
select 1: input:x dim:i index:i: select
each 1: input:x: clone detach
numel 1: input:x: numel
expand 1: input:x size:S: broadcast_to
repeat 2: input:x dims:S: tile
repeat_interleave 2: input:x repeats:i dim:i?: repeat_interleave
dot 1: input:x tensor:x: dot
outer 1: input:x vec2:x: outer
"""

_FUNCTIONS = """
each 1: condition:x input:xn other:xn: where
made_like 1: input:x dtype:t?: zeros_like ones_like
made_like 1: input:x fill_value:n dtype:t?: full_like
made 1: size:S dtype:t?: zeros ones
made 1: size:S fill_value:n dtype:t?: full
arange 1: end:i dtype:t?: arange
arange 1: start:n end:n step:n? dtype:t?: arange
constant 1: data:N dtype:t?: tensor
cat 1: tensors:L dim:i?: cat concat
stack 1: tensors:L dim:i?: stack
"""

_METHODS = """
each 1: input:x condition:x other:xn: where
reshape 1: input:x shape:S: view
like 1: input:x other:x: view_as reshape_as expand_as
expand 1: input:x size:S: expand
repeat 2: input:x repeats:S: repeat
size 1: input:x dim:i?: size
ndim 1: input:x: dim ndimension
numel 1: input:x: nelement
floats 1: input:x: float double half bfloat16
places 1: input:x: int long
flags 1: input:x: bool
to 1: input:x dtype:t: to
each 1: input:x: to contiguous
type_as 1: input:x other:x: type_as to
transpose 1: input:x: t
made_beside 1: input:x size:S dtype:t?: new_zeros new_ones
made_beside 1: input:x size:S fill_value:n dtype:t?: new_full
index_fill 1: input:x dim:i index:x value:xn: index_fill
"""

_FUNCTIONAL = """
floats 4: input:x beta:n? threshold:n?: softplus
floats 4: input:x: logsigmoid silu tanh sigmoid
each 1: input:x: relu
floats 4: input:x approximate:s?: gelu
along_floats 4: input:x dim:i _stacklevel:i? dtype:t?: softmax log_softmax
floats 1: input:x negative_slope:n?: leaky_relu
floats 4: input:x alpha:n?: elu
loss 2: input:x target:x reduction:s? delta:n?: huber_loss
loss 2: input:x target:x * reduction:s? beta:n?: smooth_l1_loss
loss 2: input:x target:x * reduction:s?: mse_loss l1_loss
loss 4: input:x target:x * reduction:s? log_target:b?: kl_div
loss 4: input:x target:x weight:x? * reduction:s?: binary_cross_entropy
loss 4: input:x target:x weight:x? * reduction:s? pos_weight:x?: binary_cross_entropy_with_logits
floats 8: input:x p:n? dim:i? eps:n?: normalize
pad 2: input:x pad:S mode:s? value:n?: pad
"""

#: The names that torch.fx has for some functions of torch.nn.functional, torch.special and torch.linalg.
_BUILT_IN = """
floats 4: input:x: _nn.log_sigmoid _special.special_expm1 _special.special_log1p _special.special_expit
floats 4: input:x beta:n? threshold:n?: _nn.softplus
floats 4: input:x approximate:s?: _nn.gelu
floats 4: input:xn other:xn: _special.special_xlogy
floats 4: input:x eps:n?: _special.special_logit
vector_norm 4: input:x ord:no? dim:d? keepdim:b? dtype:t?: _linalg.linalg_norm
reduced_floats 4: input:x ord:n? dim:d? keepdim:b? dtype:t?: _linalg.linalg_vector_norm
"""

#: Arithmetic of Python, on tensors and on numbers; `add` joins tuples, and `getitem` has a rule of its own.
_OPERATORS = """
each 1: input:xn other:xn: add sub mul and_ or_ xor
floats 1: input:xn other:xn: truediv
each 4: input:xn other:xn: floordiv mod pow
each 1: input:xn: neg pos abs invert
flags 1: input:xn other:xn: eq ne lt le gt ge
number 1: input:n: not_
getitem 8: input:x index:x: getitem
"""

#: Operations on numbers only, such as the length of a datum.
_MATH = """
number 1: x:n: sqrt exp log log2 log10 log1p expm1 floor ceil fabs tanh isfinite isinf isnan
number 1: x:n y:n: pow
"""


def _forms(text: str, prefix: str = "") -> dict[str, tuple[Form, ...]]:
    found: dict[str, tuple[Form, ...]] = {}
    for line in text.strip().splitlines():
        head, rest = line.split(": ", 1)
        parameters, names = rest.rsplit(": ", 1)
        rule, cost = head.split()
        placed, _, by_name = parameters.partition(" * ")
        every = [*_parameters(placed, by_name=False), *_parameters(by_name, by_name=True)]
        form = Form(rule, tuple(every), int(cost))
        for name in names.split():
            found[prefix + name] = (*found.get(prefix + name, ()), form)
    return found


def _parameters(text: str, *, by_name: bool) -> list[Parameter]:
    pairs = [each.split(":") for each in text.split()]
    return [Parameter(name, kinds.removesuffix("?"), kinds.endswith("?"), by_name) for name, kinds in pairs]


FUNCTIONS: Mapping[str, tuple[Form, ...]] = {
    "getattr": (),
    **_forms(_OPERATORS, "operator."),
    **_forms(_MATH, "math."),
    **_forms(_SHARED + _FUNCTIONS.lstrip(), "torch."),
    **_forms(_FUNCTIONAL, "torch.nn.functional."),
    **_forms(_BUILT_IN, "torch._C."),
}
METHODS: Mapping[str, tuple[Form, ...]] = _forms(_SHARED + _METHODS.lstrip())

#: The attributes that `getattr` may read from a tensor; the last two (values, indices) are those of the result of a
#: reduction along a dimension.
ATTRIBUTES = frozenset(["shape", "ndim", "dtype", "device", "T", "mT", "values", "indices"])

#: The dtypes that a loss may name, and what indexing takes them for: b a mask, i integers, f floating point.
DTYPES: Mapping[str, str] = {
    **dict.fromkeys(["float32", "float", "float64", "double", "float16", "half", "bfloat16"], "f"),
    **dict.fromkeys(["int64", "long", "int32", "int", "int16", "short", "int8", "uint8"], "i"),
    "bool": "b",
}
