"""Triton kernels for `gpu.py`: one program processes one tile, `TILE` elements of one tensor.

A table of int64 words describes a call's tensors, so that one launch takes any number of them:

    hyperparameters   `HEADER` words, the bits of float64 numbers, in the order of the `*_WORD` numbers below
    rows              `count` words each, in the order of the `*_ROW` numbers below: where each tensor's tiles start in
                      the launch, its number of elements, whether all its addresses are multiples of 16 bytes, and one
                      row of addresses for each list of tensors

A program finds its tensor by binary search in the row of tile starts: about log2(count) reads that hit the L1 cache,
against the hundreds of kilobytes that the program then moves. No map from program to tensor is built or stored.
Positions inside a tensor are int64: start = tile * TILE; only offsets inside a tile are int32.

A masked load compiles to element-by-element accesses. Whole blocks of tensors with aligned addresses therefore run
without a mask and state their alignment, which gives 128-bit accesses; the rest of a tensor, and tensors at odd
addresses, use the masked path. Each path has its own block size: Triton chooses one layout for all accesses of one
shape, and the masked path needs neighbouring threads on neighbouring elements. For the same reason `VECTOR`, the
elements a thread moves at once, is one number for all dtypes of a call (16 bytes of the widest): with 128 bits each,
values would pass through shared memory between bfloat16 and float32.
"""

import triton
import triton.language as tl

HEADER = tl.constexpr(8)
K_WORD, BLEND_WORD, BETA1_WORD, LOG_BETA1_WORD = map(tl.constexpr, range(4))
BETA2_WORD, LOG_BETA2_WORD, EPS_WORD, WEIGHT_DECAY_WORD = map(tl.constexpr, range(4, 8))
STARTS_ROW, SIZES_ROW, ALIGNED_ROW = map(tl.constexpr, range(3))
GRADIENTS_ROW, LAST_ROW, PARAMS_ROW, EXP_AVGS_ROW, EXP_AVG_SQS_ROW, LOST_ROW = map(tl.constexpr, range(3, 9))
LAST_SCALES_ROW, EXP_AVG_SCALES_ROW, EXP_AVG_SQ_SCALES_ROW = map(tl.constexpr, range(9, 12))
# States in 8 bits: see eight_bits.py.
CODED = tl.constexpr(64)  # elements with one scale
BITS_OF_2 = tl.constexpr(0x40000000)


@triton.jit
def locate(table, count, tile, TILE: tl.constexpr):
    """Return the tensor of a tile, the tile's first element (int64) and its number of elements (int32)."""
    tensor = count * 0  # of count's type, which the loop keeps
    high = count
    while high - tensor > 1:  # the last one whose tiles start at this one or before
        middle = (tensor + high) // 2
        before = _word(table, count, STARTS_ROW, middle) <= tile
        tensor = tl.where(before, middle, tensor)
        high = tl.where(before, high, middle)
    start = (tile - _word(table, count, STARTS_ROW, tensor)) * TILE
    length = tl.minimum(_word(table, count, SIZES_ROW, tensor) - start, TILE).to(tl.int32)
    return tensor, start, length


@triton.jit
def _word(table, count, row: tl.constexpr, tensor):
    return tl.load(table + HEADER + row * count + tensor)


@triton.jit
def _number(table, word: tl.constexpr):
    return tl.load(table + word).to(tl.float64, bitcast=True)


@triton.jit
def _pointer(table, count, row: tl.constexpr, tensor, start, TYPE: tl.constexpr):
    pointer = None  # without tensors
    if TYPE is not None:
        pointer = _word(table, count, row, tensor).to(tl.pointer_type(TYPE)) + start
    return pointer


@triton.jit
def _whole_blocks(table, count, tensor, length, BLOCK: tl.constexpr):
    """Return how many elements form whole blocks that need no mask: none at odd addresses."""
    return length // BLOCK * BLOCK * _word(table, count, ALIGNED_ROW, tensor).to(tl.int32)


@triton.jit
def _aligned(pointer, offsets, VECTOR: tl.constexpr):
    # Stated on the result of an operation: inlining drops it from a function's argument.
    return tl.multiple_of(pointer + offsets, VECTOR * (pointer.dtype.element_ty.primitive_bitwidth // 8))


@triton.jit
def _convert(value, COMPUTE: tl.constexpr):
    # Via float32: the interpreter does not convert between float64 and bfloat16 directly.
    return value.to(tl.float32).to(COMPUTE) if value.dtype == tl.bfloat16 else value.to(COMPUTE)


@triton.jit
def _read(pointer, offsets, mask, VECTOR: tl.constexpr):
    if mask is None:
        value = tl.load(_aligned(pointer, offsets, VECTOR))
    else:
        value = tl.load(pointer + offsets, mask=mask, other=0)
    return value


@triton.jit
def _load(pointer, offsets, mask, COMPUTE: tl.constexpr, VECTOR: tl.constexpr):
    return _convert(_read(pointer, offsets, mask, VECTOR), COMPUTE)


@triton.jit
def _store(pointer, offsets, value, mask, VECTOR: tl.constexpr):
    if pointer.dtype.element_ty == tl.bfloat16:
        value = value.to(tl.float32)
    value = value.to(pointer.dtype.element_ty)
    if mask is None:
        tl.store(_aligned(pointer, offsets, VECTOR), value)
    else:
        tl.store(pointer + offsets, value, mask=mask)


@triton.jit
def _load_state(state, scales, offsets, mask, COMPUTE: tl.constexpr, VECTOR: tl.constexpr):
    """Load a state, decoded if it is in 8 bits."""
    if scales is None:
        value = _load(state, offsets, mask, COMPUTE, VECTOR)
    else:
        IS_ROOT: tl.constexpr = state.dtype.element_ty == tl.uint8
        SHIFT: tl.constexpr = 18 if IS_ROOT else 19
        UNIT: tl.constexpr = 1 / 502 if IS_ROOT else 1 / 494
        code = _read(state, offsets, mask, VECTOR).to(tl.int32)
        if mask is None:
            scale = tl.load(scales + offsets // CODED)
        else:
            scale = tl.load(scales + offsets // CODED, mask=mask, other=0.0)
        level = (((tl.abs(code) << SHIFT) + BITS_OF_2).to(tl.float32, bitcast=True) - 2.0) * UNIT
        level = level * level if IS_ROOT else tl.where(code < 0, -level, level)
        value = (level * scale).to(COMPUTE)
    return value


@triton.jit
def _store_state(state, scales, offsets, value, mask, step, SIZE: tl.constexpr, VECTOR: tl.constexpr):
    """Store a state, encoded if it is in 8 bits: a block holds whole blocks of codes."""
    if scales is None:
        _store(state, offsets, value, mask, VECTOR)
    else:
        IS_ROOT: tl.constexpr = state.dtype.element_ty == tl.uint8
        SHIFT: tl.constexpr = 18 if IS_ROOT else 19
        RANGE: tl.constexpr = 502.0 if IS_ROOT else 494.0
        x = tl.reshape(value.to(tl.float32), (SIZE // CODED, CODED))
        inside = None if mask is None else tl.reshape(mask, (SIZE // CODED, CODED))
        sizes = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        if mask is not None:
            sizes = tl.where(inside, sizes, 0)
        # As integers, NaN is larger than all numbers.
        scale = tl.expand_dims(tl.max(sizes, 1), 1).to(tl.float32, bitcast=True)
        size = sizes.to(tl.float32, bitcast=True)
        if IS_ROOT:
            size = tl.sqrt_rn(size)
            largest = tl.sqrt_rn(scale)
        else:
            scale = tl.where(scale < 3.009265538105056e-36, 0.0, scale)  # 2^-118
            largest = scale
        y = size * tl.where(largest == 0, 0.0, tl.div_rn(RANGE, largest)) + 2.0
        lanes = tl.expand_dims(tl.arange(0, CODED), 0)
        threshold = ((((159 * (step & 255) + 97 * lanes) & 255) << 11) + 1024) >> (19 - SHIFT)
        code = (y.to(tl.int32, bitcast=True) - BITS_OF_2 + threshold) >> SHIFT
        if IS_ROOT:
            code = tl.maximum(code, (sizes > 0).to(tl.int32))
        else:
            code = tl.where(x < 0, -code, code)
        tl.store(state + offsets, tl.reshape(code, (SIZE,)).to(state.dtype.element_ty), mask=mask)
        first = tl.reshape(offsets, (SIZE // CODED, CODED))
        is_first = lanes == 0 if mask is None else (lanes == 0) & inside
        tl.store(scales + first // CODED, tl.broadcast_to(scale, (SIZE // CODED, CODED)), mask=is_first)


@triton.jit
def _load_param(param, lost, offsets, mask, COMPUTE: tl.constexpr, VECTOR: tl.constexpr):
    """Return parameters, with what Kahan's rounding has kept beside them."""
    p = _load(param, offsets, mask, COMPUTE, VECTOR)
    if lost is not None:
        if lost.dtype.element_ty == tl.int8:
            bits = p.to(tl.float32).to(tl.int32, bitcast=True)
            size = bits & 0x7FFFFFFF
            more = tl.maximum(size + _read(lost, offsets, mask, VECTOR).to(tl.int32) * 256, 0)
            joined = (bits ^ size) | tl.where(size < 0x7F800000, more, size)
            p = joined.to(tl.float32, bitcast=True).to(COMPUTE)
        else:
            p += _load(lost, offsets, mask, COMPUTE, VECTOR)
    return p


@triton.jit
def _store_param(param, lost, offsets, p, mask, COMPUTE: tl.constexpr, VECTOR: tl.constexpr):
    """Store parameters, and for Kahan's rounding beside them what bfloat16 cannot hold."""
    if lost is not None:
        if lost.dtype.element_ty == tl.int8:
            bits = p.to(tl.float32).to(tl.int32, bitcast=True)
            size = bits & 0x7FFFFFFF
            shorter = tl.where(size < 0x7F800000, size + 128, size) >> 8
            rounded = tl.where(size <= 0x7F800000, (shorter + 128) >> 8, 0x7FC0)
            left = tl.where(size < 0x7F800000, shorter - (rounded << 8), 0)
            tl.store(lost + offsets, left.to(tl.int8), mask=mask)
            p = ((bits ^ size) | (rounded << 16)).to(tl.float32, bitcast=True).to(COMPUTE)
        else:
            rounded = _convert(p.to(tl.float32).to(tl.bfloat16), COMPUTE)
            _store(lost, offsets, p - rounded, mask, VECTOR)
            p = rounded
    _store(param, offsets, p, mask, VECTOR)


@triton.jit
def _divide(x, y):
    """Divide with correct rounding, as PyTorch does; `/` is approximate in float32."""
    return tl.div_rn(x, y) if x.dtype == tl.float32 else x / y


@triton.jit
def _root(x):
    return tl.sqrt_rn(x) if x.dtype == tl.float32 else tl.sqrt(x)


@triton.jit
def _round_stochastically(value, offsets, key):
    """Round to either bfloat16 neighbour, unbiased; the result is float32."""
    # MurmurHash3's finalizer; Philox costs too much.
    noise = offsets.to(tl.uint32) * 0x9E3779B1 + key
    noise = (noise ^ (noise >> 16)) * 0x85EBCA6B
    noise = (noise ^ (noise >> 13)) * 0xC2B2AE35
    noise = noise ^ (noise >> 16)
    value = value.to(tl.float32)
    bits = value.to(tl.uint32, bitcast=True)
    rounded = ((bits + (noise & 0xFFFF)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    # A carry into the exponent would turn some NaNs into numbers.
    return tl.where((bits & 0x7F800000) == 0x7F800000, value, rounded)


@triton.jit
def _multiplier(numbers, index, COMPUTE: tl.constexpr):
    """Return the number that multiplies a tensor, 1 by default."""
    number = tl.full((), 1.0, COMPUTE)
    if numbers is not None:
        number = _convert(tl.load(numbers + index), COMPUTE)
    return number


@triton.jit
def _correct(gradient, last, last_scales, offsets, mask, scale, k, COMPUTE: tl.constexpr, VECTOR: tl.constexpr):
    """Return g, the last gradient and c of one block; sums and update share this code."""
    g = _load(gradient, offsets, mask, COMPUTE, VECTOR) * scale
    # Assignments in both branches: Triton, unlike its interpreter, compiles the code after a return inside an `if`.
    if last is None:
        previous = tl.zeros_like(g)
        c = g
    else:
        previous = _load_state(last, last_scales, offsets, mask, COMPUTE, VECTOR)
        # c_t = g_t + k (g_t - last_t)
        c = g + k * (g - previous)
    return g, previous, c


@triton.jit
def _product(x, y):
    return x.to(tl.float64) * y.to(tl.float64)


@triton.jit
def _block_sums(
    gradient, last, last_scales, begin, end, scale, k,
    SIZE: tl.constexpr, MASKED: tl.constexpr, COMPUTE: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Return <g, g>, <g, last>, <last, last> and <c, c> over the elements from `begin` to `end`."""
    gg = tl.zeros((SIZE,), tl.float64)
    gl = tl.zeros((SIZE,), tl.float64)
    ll = tl.zeros((SIZE,), tl.float64)
    cc = tl.zeros((SIZE,), tl.float64)
    for block in range(0, tl.cdiv(end - begin, SIZE)):
        offsets = begin + block * SIZE + tl.arange(0, SIZE)
        mask = offsets < end if MASKED else None
        g, previous, c = _correct(gradient, last, last_scales, offsets, mask, scale, k, COMPUTE, VECTOR)
        gg += _product(g, g)
        gl += _product(g, previous)
        ll += _product(previous, previous)
        cc += _product(c, c)
    return tl.sum(gg), tl.sum(gl), tl.sum(ll), tl.sum(cc)


@triton.jit(do_not_specialize=["count", "tiles", "scale"])
def partial_sums(
    table, count, tiles, scale, partials,
    GRADIENT: tl.constexpr, LAST: tl.constexpr, LAST_SCALE: tl.constexpr, COMPUTE: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, MASKED_BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Sum g*g, g*last, last*last and c*c over one tile into `partials`, rows of one number per tile.

    Without last gradients there is one row: c is g, and the others are 0. Values are in COMPUTE. Products are in
    float64, where the square of a float32 never overflows.
    """
    tile = tl.program_id(0).to(tl.int64)
    tensor, start, length = locate(table, count, tile, TILE)
    gradient = _pointer(table, count, GRADIENTS_ROW, tensor, start, GRADIENT)
    last = _pointer(table, count, LAST_ROW, tensor, start, LAST)
    last_scales = _pointer(table, count, LAST_SCALES_ROW, tensor, start // CODED, LAST_SCALE)
    k = _number(table, K_WORD).to(COMPUTE)
    scale = _multiplier(scale, 0, COMPUTE)
    whole = _whole_blocks(table, count, tensor, length, BLOCK)
    gg, gl, ll, cc = _block_sums(gradient, last, last_scales, 0, whole, scale, k, BLOCK, False, COMPUTE, VECTOR)
    rest_gg, rest_gl, rest_ll, rest_cc = _block_sums(
        gradient, last, last_scales, whole, length, scale, k, MASKED_BLOCK, True, COMPUTE, VECTOR
    )
    row = tiles.to(tl.int64)
    tl.store(partials + tile, gg + rest_gg)
    if last is not None:
        tl.store(partials + row + tile, gl + rest_gl)
        tl.store(partials + 2 * row + tile, ll + rest_ll)
        tl.store(partials + 3 * row + tile, cc + rest_cc)


@triton.jit(do_not_specialize=["count", "tiles"])
def total_sums(table, count, tiles, partials, sums, LAST: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Add one row of a tensor's partial sums into `sums`, in float64 and always in the same order."""
    tensor, row = tl.program_id(0), tl.program_id(1)
    first = _word(table, count, STARTS_ROW, tensor)
    end = first + tl.cdiv(_word(table, count, SIZES_ROW, tensor), TILE)
    total = tl.zeros((BLOCK,), tl.float64)
    for begin in range(first, end, BLOCK):
        offsets = begin + tl.arange(0, BLOCK)
        total += tl.load(partials + row * tiles.to(tl.int64) + offsets, mask=offsets < end, other=0.0)
    tl.store(sums + row * count + tensor, tl.sum(total))
    if LAST is None:  # c is g
        tl.store(sums + 3 * count + tensor, tl.sum(total))


@triton.jit
def _noise_key(seeds, tensor, start, PARAM: tl.constexpr, TILE: tl.constexpr):
    """Return the key of a tile's noise, None to round to nearest; other tensors in the launch make no difference."""
    key = None
    if seeds is not None and PARAM == tl.bfloat16:
        key = tl.randint(tl.load(seeds + tensor), (start // TILE).to(tl.uint32)).to(tl.uint32, bitcast=True)
    return key


@triton.jit
def _shrink(p, m, decay, CAUTIOUS: tl.constexpr):
    """Decay parameters; if cautious, where the update takes them toward zero only."""
    shrunk = p * decay
    if CAUTIOUS:
        shrunk = tl.where(((m > 0) & (p < 0)) | ((m < 0) & (p > 0)), p, shrunk)
    return shrunk


@triton.jit
def _update_blocks(
    param, gradient, exp_avg, exp_avg_sq, last, lost, exp_avg_scales, exp_avg_sq_scales, last_scales,
    begin, end, key,
    scale, factor, k, blend, beta1, weight1, beta2, weight2, eps, decay, step_size, root2, step,
    SIZE: tl.constexpr, MASKED: tl.constexpr, COMPUTE: tl.constexpr, RULE: tl.constexpr, CORRECTED: tl.constexpr,
    CAUTIOUS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Update the elements from `begin` to `end`; a block is read before it is written.

    g gradient, c corrected gradient, e average of c, m first moment, v second moment, p parameter.
    """
    for first in range(begin, end, SIZE):
        offsets = first + tl.arange(0, SIZE)
        mask = offsets < end if MASKED else None
        g, _, c = _correct(gradient, last, last_scales, offsets, mask, scale, k, COMPUTE, VECTOR)
        e = _load_state(exp_avg, exp_avg_scales, offsets, mask, COMPUTE, VECTOR)
        if RULE != "momentum":
            p = _load_param(param, lost, offsets, mask, COMPUTE, VECTOR)
        c = c * factor
        # e_t = beta1 e_{t-1} + (1 - beta1) c_t, as torch.lerp: exact at weights 0 and 1.
        difference = c - e
        e = tl.where(weight1 < 0.5, e + weight1 * difference, c - beta1 * difference)
        # m_t = e_t + blend (c_t - e_t); the test for 0 avoids infinity minus infinity.
        m = tl.where(blend == 0, e, e + blend * (c - e))
        if RULE == "momentum":
            p = m
        elif RULE == "lion":
            m = tl.where((g == 0) & (m == m), 0.0, m)  # signs rest where g_t is 0
            # x_{t+1} = x_t - lr (sign(m_t) + weight_decay x_t); NaN stays NaN, unlike in torch.sign.
            p = _shrink(p, m, decay, CAUTIOUS)
            p = p - step_size * tl.where(m > 0, 1.0, tl.where(m < 0, -1.0, m)).to(COMPUTE)
        else:
            s = c if CORRECTED else g
            # v_t = beta2 v_{t-1} + (1 - beta2) s^2
            v = _load_state(exp_avg_sq, exp_avg_sq_scales, offsets, mask, COMPUTE, VECTOR)
            v = beta2 * v + weight2 * (s * s)
            # x_{t+1} = x_t - lr (m_t / (1 - beta1^t) / (sqrt(v_t / (1 - beta2^t)) + eps) + weight_decay x_t)
            p = _shrink(p, m, decay, CAUTIOUS)
            p = p - step_size * _divide(m, _divide(_root(v), root2) + eps)
            _store_state(exp_avg_sq, exp_avg_sq_scales, offsets, v, mask, step, SIZE, VECTOR)
        if key is not None:
            p = _round_stochastically(p, offsets, key)
        _store_state(exp_avg, exp_avg_scales, offsets, e, mask, step, SIZE, VECTOR)
        _store_param(param, lost, offsets, p, mask, COMPUTE, VECTOR)
        if last is not None:
            _store_state(last, last_scales, offsets, g, mask, step, SIZE, VECTOR)


@triton.jit(do_not_specialize=["count", "steps", "lr", "scale", "factors", "seeds"])
def update(
    table, count, steps, lr, scale, factors, seeds,
    PARAM: tl.constexpr, GRADIENT: tl.constexpr, EXP_AVG: tl.constexpr, EXP_AVG_SQ: tl.constexpr, LAST: tl.constexpr,
    LOST: tl.constexpr, EXP_AVG_SCALE: tl.constexpr, EXP_AVG_SQ_SCALE: tl.constexpr, LAST_SCALE: tl.constexpr,
    COMPUTE: tl.constexpr, RULE: tl.constexpr, CORRECTED: tl.constexpr, CAUTIOUS: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, MASKED_BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Update one tile: each tensor is read and written at most once.

    Numbers common to a tensor are computed in float64 and rounded once.
    """
    tile = tl.program_id(0).to(tl.int64)
    tensor, start, length = locate(table, count, tile, TILE)
    param = _pointer(table, count, PARAMS_ROW, tensor, start, PARAM)
    gradient = _pointer(table, count, GRADIENTS_ROW, tensor, start, GRADIENT)
    exp_avg = _pointer(table, count, EXP_AVGS_ROW, tensor, start, EXP_AVG)
    exp_avg_sq = _pointer(table, count, EXP_AVG_SQS_ROW, tensor, start, EXP_AVG_SQ)
    last = _pointer(table, count, LAST_ROW, tensor, start, LAST)
    lost = _pointer(table, count, LOST_ROW, tensor, start, LOST)
    block = start // CODED
    exp_avg_scales = _pointer(table, count, EXP_AVG_SCALES_ROW, tensor, block, EXP_AVG_SCALE)
    exp_avg_sq_scales = _pointer(table, count, EXP_AVG_SQ_SCALES_ROW, tensor, block, EXP_AVG_SQ_SCALE)
    last_scales = _pointer(table, count, LAST_SCALES_ROW, tensor, block, LAST_SCALE)

    k = _number(table, K_WORD).to(COMPUTE)
    blend = _number(table, BLEND_WORD).to(COMPUTE)
    beta1 = _number(table, BETA1_WORD).to(COMPUTE)
    weight1 = (1.0 - _number(table, BETA1_WORD)).to(COMPUTE)
    beta2 = _number(table, BETA2_WORD).to(COMPUTE)
    weight2 = (1.0 - _number(table, BETA2_WORD)).to(COMPUTE)
    eps = _number(table, EPS_WORD).to(COMPUTE)
    rate = tl.load(lr).to(tl.float64)
    decay = (1.0 - rate * _number(table, WEIGHT_DECAY_WORD)).to(COMPUTE)
    step_size = rate.to(COMPUTE)
    root2 = None
    step = tl.load(steps + tensor).to(tl.int32)
    if RULE == "adamw":
        # 1 - beta**t = 1 - exp(t log(beta)). In float64 its error is below 1e-16 (1 + t |log(beta)|), 1e-13 of a
        # correction as small as 1e-3; in float32 the cancellation at t = 1 would cost four of seven digits.
        t = tl.load(steps + tensor).to(tl.float64)
        step_size = (rate / (1.0 - tl.exp(t * _number(table, LOG_BETA1_WORD)))).to(COMPUTE)
        root2 = tl.sqrt(1.0 - tl.exp(t * _number(table, LOG_BETA2_WORD))).to(COMPUTE)
    scale = _multiplier(scale, 0, COMPUTE)
    factor = _multiplier(factors, tensor, COMPUTE)
    key = _noise_key(seeds, tensor, start, PARAM, TILE)
    whole = _whole_blocks(table, count, tensor, length, BLOCK)
    _update_blocks(
        param, gradient, exp_avg, exp_avg_sq, last, lost, exp_avg_scales, exp_avg_sq_scales, last_scales,
        0, whole, key,
        scale, factor, k, blend, beta1, weight1, beta2, weight2, eps, decay, step_size, root2, step,
        BLOCK, False, COMPUTE, RULE, CORRECTED, CAUTIOUS, VECTOR,
    )  # fmt: skip
    _update_blocks(
        param, gradient, exp_avg, exp_avg_sq, last, lost, exp_avg_scales, exp_avg_sq_scales, last_scales,
        whole, length, key,
        scale, factor, k, blend, beta1, weight1, beta2, weight2, eps, decay, step_size, root2, step,
        MASKED_BLOCK, True, COMPUTE, RULE, CORRECTED, CAUTIOUS, VECTOR,
    )  # fmt: skip
