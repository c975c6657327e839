// The rules on CPUs, called by cpu.py. Plain C++17 and OpenMP, without PyTorch's headers.
//
// A table of int64 words describes a call's tensors: the type of each list, then a row of addresses for each list, a row
// of sizes and a row of seeds, one column per tensor. Each tensor also has a row of Scalars. All sizes and offsets are
// 64 bits wide.
//
// Work is divided into rows of ROW elements. Each row has its own partial sums, in double, which add up in one order:
// results do not depend on the number of threads. Within a row, work proceeds in blocks that fit into the first-level
// cache; tensors of another type than the arithmetic's are converted there, so that one code serves all types.

#include <omp.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

constexpr int64_t ROW = 4096;
constexpr int64_t BLOCK = 256;
// Elements above which more threads pay off; PyTorch's value.
constexpr int64_t GRAIN = 32768;
// Elements whose gradients stay in a cache between their sums and their update, unless one tensor has more.
constexpr int64_t WAVE = 1 << 20;

// LOST: what Kahan's rounding keeps. The scales, of states in 8 bits, are in the order of these.
enum List {
    PARAM, GRADIENT, EXP_AVG, EXP_AVG_SQ, LAST_GRAD, LOST, EXP_AVG_SCALE, EXP_AVG_SQ_SCALE, LAST_GRAD_SCALE, LISTS
};
constexpr int64_t CODED = 64;  // elements with one scale
constexpr int VALUES = LOST;  // lists that a block opens
enum Type { ABSENT, BFLOAT16, FLOAT32, FLOAT64, INT8, UINT8 };
enum Rule { ADAMW, LION, MOMENTUM };
enum Sum { GG, GL, LL, CC, SUMS };

// In the order of SCALARS in cpu.py. decay = 1 - lr weight_decay, decay_away the same where the update takes a weight
// away from zero, rate = lr / (1 - beta1^t), root = 1 / sqrt(1 - beta2^t); rate is lr for other rules. Those of the
// caller are in double.
template <class T>
struct Scalars {
    T grad_scale, correction, clip_factor, one_minus_beta1, blend, beta2, one_minus_beta2, decay, decay_away, rate;
    T root, eps, step;

    bool is_cautious() const { return decay != decay_away; }
};

struct Tensors {
    int64_t count;
    const int64_t* words;

    Type type(List list) const { return static_cast<Type>(words[list]); }
    void* data(List list, int64_t i) const { return reinterpret_cast<void*>(words[LISTS + list * count + i]); }
    int64_t size(int64_t i) const { return words[LISTS + LISTS * count + i]; }
    uint64_t seed(int64_t i) const { return static_cast<uint64_t>(words[LISTS + (LISTS + 1) * count + i]); }
    int64_t rows(int64_t i) const { return (size(i) + ROW - 1) / ROW; }
    float* scales(List list, int64_t i, int64_t at) const {
        return static_cast<float*>(data(List(list - EXP_AVG + EXP_AVG_SCALE), i)) + at / CODED;
    }
    bool has(List list) const { return type(list) != ABSENT; }
    bool is_double() const { return std::count(words, words + LISTS, FLOAT64) > 0; }  // the type of the arithmetic

    int64_t rows(int64_t first, int64_t last) const {
        int64_t total = 0;
        for (int64_t i = first; i < last; i++) total += rows(i);
        return total;
    }
};

// --- types ----------------------------------------------------------------------------------------------------------

template <class To, class From>
To bits(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To result;
    std::memcpy(&result, &value, sizeof(To));
    return result;
}

struct BFloat16 {
    uint16_t word;

    operator float() const { return bits<float>(static_cast<uint32_t>(word) << 16); }

    static BFloat16 nearest(float value) {
        uint32_t word = bits<uint32_t>(value);
        uint32_t rounded = (word + 0x7fffu + (word >> 16 & 1)) >> 16;
        return {static_cast<uint16_t>((word & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded)};
    }

    // Rounds to either neighbour: adds 16 random bits below the last place of bfloat16, then truncates.
    static BFloat16 random(float value, uint32_t noise) {
        uint32_t word = bits<uint32_t>(value);
        bool finite = (word & 0x7f800000u) != 0x7f800000u;
        return finite ? BFloat16{static_cast<uint16_t>((word + (noise & 0xffffu)) >> 16)} : nearest(value);
    }
};

template <class T>
constexpr Type type_of = sizeof(T) == 8 ? FLOAT64 : FLOAT32;

template <class T, class From>
void widen(int64_t n, const From* from, T* to) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) to[i] = static_cast<T>(from[i]);
}

template <class T>
void narrow(int64_t n, const T* from, BFloat16* to) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) to[i] = BFloat16::nearest(static_cast<float>(from[i]));
}

// Restores what Kahan's rounding has kept: a bfloat16, and 8 more bits of its last place.
void restore(int64_t n, const BFloat16* from, const int8_t* lost, float* to) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        uint32_t word = static_cast<uint32_t>(from[i].word) << 16;
        int32_t size = static_cast<int32_t>(word & 0x7fffffffu), sum = size + lost[i] * 256;
        bool finite = size < 0x7f800000;
        to[i] = bits<float>((word & 0x80000000u) | static_cast<uint32_t>(finite ? std::max(sum, 0) : size));
    }
}

// Rounds to 24 bits: to the nearest bfloat16, and 8 bits of what it lacks.
void keep(int64_t n, const float* from, BFloat16* to, int8_t* lost) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        uint32_t word = bits<uint32_t>(from[i]), size = word & 0x7fffffffu;
        uint32_t shorter = size < 0x7f800000u ? (size + 128) >> 8 : size >> 8;
        uint32_t rounded = size <= 0x7f800000u ? (shorter + 128) >> 8 : 0x7fc0u;
        to[i] = {static_cast<uint16_t>((word >> 16 & 0x8000u) | rounded)};
        lost[i] = size < 0x7f800000u ? static_cast<int8_t>(shorter - (rounded << 8)) : 0;
    }
}

// --- states in 8 bits (see eight_bits.py) ---------------------------------------------------------------------------

constexpr int64_t WIDTH = 8;
typedef float Floats __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Ints __attribute__((vector_size(4 * WIDTH)));
constexpr int32_t TWO = 0x40000000;  // the bits of 2.0f
constexpr int32_t SIZE = 0x7fffffff;  // all bits but the sign

template <class Vector>
Vector load(const void* from) {
    Vector to;
    std::memcpy(&to, from, sizeof to);
    return to;
}

template <class Vector>
void store(Vector from, void* to) {
    std::memcpy(to, &from, sizeof from);
}

Floats all(float x) { return Floats{} + x; }

#ifdef __AVX2__
__m128i eight_bytes(const void* from) { return _mm_loadl_epi64(static_cast<const __m128i*>(from)); }
Ints widened(const int8_t* from) { return Ints(_mm256_cvtepi8_epi32(eight_bytes(from))); }
Ints widened(const uint8_t* from) { return Ints(_mm256_cvtepu8_epi32(eight_bytes(from))); }
Ints absolute(Ints x) { return Ints(_mm256_abs_epi32(__m256i(x))); }
Ints larger(Ints x, Ints y) { return Ints(_mm256_max_epi32(__m256i(x), __m256i(y))); }
// x times the sign of y: -x, 0 or x.
Ints with_sign(Ints x, Ints y) { return Ints(_mm256_sign_epi32(__m256i(x), __m256i(y))); }
Floats root(Floats x) { return _mm256_sqrt_ps(x); }
// x y + z, rounded once where the processor can: arithmetic is the limit here.
Floats fused(Floats x, Floats y, Floats z) { return _mm256_fmadd_ps(x, y, z); }

float largest(Ints sizes) {
    __m256i x = __m256i(larger(sizes, Ints(_mm256_permute2x128_si256(__m256i(sizes), __m256i(sizes), 1))));
    x = _mm256_max_epi32(x, _mm256_shuffle_epi32(x, 0x4e));
    x = _mm256_max_epi32(x, _mm256_shuffle_epi32(x, 0xb1));
    return bits<float>(_mm256_cvtsi256_si32(x));
}

// Narrows 4 vectors, saturated.
template <class Byte>
void narrow(const Ints* from, Byte* to) {
    __m256i low = _mm256_packs_epi32(__m256i(from[0]), __m256i(from[1]));
    __m256i high = _mm256_packs_epi32(__m256i(from[2]), __m256i(from[3]));
    __m256i bytes = std::is_signed<Byte>() ? _mm256_packs_epi16(low, high) : _mm256_packus_epi16(low, high);
    bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bytes);
}
#else
template <class Vector, class Function>
Vector each(Function function) {
    Vector result;
    for (int64_t i = 0; i < WIDTH; i++) result[i] = function(i);
    return result;
}

template <class Byte>
Ints widened(const Byte* from) { return each<Ints>([=](int64_t i) { return from[i]; }); }
Ints absolute(Ints x) { return each<Ints>([=](int64_t i) { return std::abs(x[i]); }); }
Ints larger(Ints x, Ints y) { return each<Ints>([=](int64_t i) { return std::max(x[i], y[i]); }); }
Ints with_sign(Ints x, Ints y) { return each<Ints>([=](int64_t i) { return y[i] < 0 ? -x[i] : y[i] > 0 ? x[i] : 0; }); }
Floats root(Floats x) { return each<Floats>([=](int64_t i) { return std::sqrt(x[i]); }); }
Floats fused(Floats x, Floats y, Floats z) { return x * y + z; }

float largest(Ints sizes) {
    int32_t result = 0;
    for (int64_t i = 0; i < WIDTH; i++) result = std::max(result, sizes[i]);
    return bits<float>(result);
}

template <class Byte>
void narrow(const Ints* from, Byte* to) {
    for (int64_t i = 0; i < 4 * WIDTH; i++) to[i] = static_cast<Byte>(from[i / WIDTH][i % WIDTH]);
}
#endif

// The code of first moments and last gradients, int8_t, or of the roots of second moments, uint8_t.
template <class Byte>
struct Code {
    static constexpr bool is_root = !std::is_signed<Byte>();
    static constexpr float range = is_root ? 502 : 494, unit = 1 / range;
    static constexpr int shift = is_root ? 18 : 19;

    // Returns y - 2 of 8 codes, with the sign of each.
    static Floats levels(const Byte* codes) {
        Ints code = widened(codes);
        Floats level = Floats((absolute(code) << shift) + TWO) - 2;
        return is_root ? level : Floats(Ints(level) | (code & ~SIZE));
    }

    // Codes 64 values (roots of second moments), and writes their scale.
    static void encode(const float* values, float scale, const int32_t* thresholds, Byte* codes, float* to) {
        if (!is_root && scale < 0x1p-118f) scale = 0;
        *to = scale;
        Floats inverse = all(scale == 0 ? 0 : range / (is_root ? std::sqrt(scale) : scale));
        for (int64_t i = 0; i < CODED; i += 4 * WIDTH) {
            Ints narrowed[4];
            for (int64_t j = 0; j < 4; j++) {
                Ints word = load<Ints>(values + i + j * WIDTH);
                Ints y = Ints(fused(Floats(word & SIZE), inverse, all(2)));
                Ints code = (y - TWO + load<Ints>(thresholds + i + j * WIDTH)) >> shift;
                // What is not zero keeps a root: a step divides by it.
                narrowed[j] = is_root ? larger(code, with_sign(Ints{} + 1, word)) : with_sign(code, word);
            }
            narrow(narrowed, codes + i);
        }
    }
};

// What is added below the last place of a code in a step, for each element of a block.
struct Thresholds {
    int32_t of_values[CODED], of_roots[CODED];

    explicit Thresholds(int64_t step) {
        for (int32_t i = 0; i < CODED; i++) {
            of_values[i] = ((159 * static_cast<int32_t>(step & 255) + 97 * i) & 255) * 2048 + 1024;
            of_roots[i] = of_values[i] / 2;
        }
    }
};

// Decodes n last gradients.
template <class T>
void decode(int64_t n, const int8_t* codes, const float* scales, T* to) {
    using Value = Code<int8_t>;
    int64_t whole = n - n % WIDTH;
    for (int64_t i = 0; i < whole; i += WIDTH) {
        Floats values = Value::levels(codes + i) * Value::unit * scales[i / CODED];
        if constexpr (sizeof(T) == sizeof(float))
            store(values, to + i);
        else
            for (int64_t j = 0; j < WIDTH; j++) to[i + j] = values[j];
    }
    if (whole < n) {
        int8_t rest[WIDTH] = {};
        std::memcpy(rest, codes + whole, n - whole);
        Floats values = Value::levels(rest) * Value::unit * scales[whole / CODED];
        for (int64_t j = whole; j < n; j++) to[j] = values[j - whole];
    }
}

// --- opening and closing of blocks ----------------------------------------------------------------------------------

// Returns n elements from `at` on in the type of the arithmetic: in place, or converted into `buffer`.
template <class T>
T* open(const Tensors& tensors, List list, int64_t i, int64_t at, int64_t n, T* buffer, bool read = true) {
    void* data = tensors.data(list, i);
    Type type = tensors.type(list);
    if (type == type_of<T>) return static_cast<T*>(data) + at;
    if (!read) return buffer;
    if constexpr (sizeof(T) == 4) {
        if (list == PARAM && tensors.has(LOST)) {
            restore(n, static_cast<BFloat16*>(data) + at, static_cast<int8_t*>(tensors.data(LOST, i)) + at, buffer);
            return buffer;
        }
    }
    if (type == INT8) decode(n, static_cast<int8_t*>(data) + at, tensors.scales(list, i, at), buffer);
    if (type == BFLOAT16) widen(n, static_cast<BFloat16*>(data) + at, buffer);
    if (type == FLOAT32) widen(n, static_cast<float*>(data) + at, buffer);
    if (type == FLOAT64) widen(n, static_cast<double*>(data) + at, buffer);
    return buffer;
}

// Rounds back the values that `open` has converted; a no-op for values changed in place.
template <class T>
void close(const Tensors& tensors, List list, int64_t i, int64_t at, int64_t n, const T* values) {
    void* data = tensors.data(list, i);
    Type type = tensors.type(list);
    if (type == type_of<T>) return;
    if constexpr (sizeof(T) == 4) {
        if (list == PARAM && tensors.has(LOST)) {
            keep(n, values, static_cast<BFloat16*>(data) + at, static_cast<int8_t*>(tensors.data(LOST, i)) + at);
            return;
        }
    }
    if (type == BFLOAT16) narrow(n, values, static_cast<BFloat16*>(data) + at);
    if (type == FLOAT32) widen(n, values, static_cast<float*>(data) + at);
    if (type == FLOAT64) widen(n, values, static_cast<double*>(data) + at);
}

uint64_t mixed(uint64_t x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

// Rounds stochastically; the noise depends on seed and element only, not on the number of threads.
template <class T>
void close_at_random(const Tensors& tensors, int64_t i, int64_t at, int64_t n, const T* values) {
    auto to = static_cast<BFloat16*>(tensors.data(PARAM, i)) + at;
    auto start = static_cast<uint32_t>(mixed(mixed(tensors.seed(i)) + at));
#pragma omp simd
    for (int64_t j = 0; j < n; j++) {
        uint32_t noise = start + static_cast<uint32_t>(j) * 0x9e3779b9u;
        noise = (noise ^ noise >> 16) * 0x85ebca6bu;
        noise = (noise ^ noise >> 13) * 0xc2b2ae35u;
        to[j] = BFloat16::random(static_cast<float>(values[j]), noise >> 16);
    }
}

// --- division of work -----------------------------------------------------------------------------------------------

// Calls work(tensor, offset, elements, row) for this thread's share of the rows of the tensors from `first` to `last`.
template <class Work>
void share(const Tensors& tensors, int64_t first, int64_t last, Work work) {
    int64_t row = tensors.rows(0, first), rows = tensors.rows(first, last);
    int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    int64_t begin = row + rows * thread / threads, end = row + rows * (thread + 1) / threads;
    for (int64_t i = first; i < last && row < end; row += tensors.rows(i++)) {
        int64_t stop = std::min(end, row + tensors.rows(i));
        for (int64_t r = std::max(begin, row); r < stop; r++) {
            int64_t at = (r - row) * ROW;
            work(i, at, std::min(ROW, tensors.size(i) - at), r);
        }
    }
}

// All threads or one: a smaller team ends threads that the next one would have to start again.
int64_t useful_threads(const Tensors& tensors, int64_t threads) {
    int64_t elements = 0;
    for (int64_t i = 0; i < tensors.count; i++) elements += tensors.size(i);
    return elements > GRAIN ? threads : 1;
}

double total(const double* sums, int64_t count, int64_t stride = 1) {
    double result = 0;
    for (int64_t i = 0; i < count; i++) result += sums[i * stride];
    return result;
}

// --- sums -----------------------------------------------------------------------------------------------------------

// Sums term(0) to term(n - 1) in T. LANES sums keep additions in flight while memory is read in one stream.
constexpr int64_t LANES = 32;

template <class T, class Term>
double sum_in(int64_t n, Term term) {
    T lanes[LANES] = {};
    int64_t whole = n - n % LANES;
    for (int64_t i = 0; i < whole; i += LANES) {
#pragma omp simd
        for (int64_t j = 0; j < LANES; j++) lanes[j] += term(T(0), i + j);
    }
    for (int64_t i = whole; i < n; i++) lanes[i - whole] += term(T(0), i);
    double result = 0;
    for (T lane : lanes) result += lane;
    return result;
}

// Sums in the type of the arithmetic, which is twice as fast, and in double if that overflows.
template <class T, class Term>
double sum(int64_t n, Term term) {
    double result = sum_in<T>(n, term);
    return std::isfinite(result) ? result : sum_in<double>(n, term);
}

// <g, g>, <g, last> and <last, last>, summed in `Wide`.
template <class Wide, class T>
void sum_products(int64_t n, const T* g, const T* last, double* sums) {
    sums[GG] = sum_in<Wide>(n, [=](Wide, int64_t j) { return Wide(g[j]) * Wide(g[j]); });
    sums[GL] = sum_in<Wide>(n, [=](Wide, int64_t j) { return Wide(g[j]) * Wide(last[j]); });
    sums[LL] = sum_in<Wide>(n, [=](Wide, int64_t j) { return Wide(last[j]) * Wide(last[j]); });
}

// Returns <g, g> over a row, before scaling.
template <class T>
double row_square(const Tensors& tensors, int64_t i, int64_t at, int64_t n) {
    T buffer[ROW];
    const T* g = open(tensors, GRADIENT, i, at, n, buffer);
    return sum<T>(n, [=](auto type, int64_t j) { return decltype(type)(g[j]) * decltype(type)(g[j]); });
}

// Writes the sums over a row that the caller needs: <g, g>, <g, last>, <last, last> before scaling, and <c, c>.
template <class T>
void row_sums(const Tensors& tensors, const Scalars<double>& scalars, int64_t i, int64_t at, int64_t n, bool products,
              bool corrected, double* sums) {
    std::fill(sums, sums + SUMS, 0.0);
    if (!tensors.has(LAST_GRAD)) {
        sums[GG] = row_square<T>(tensors, i, at, n);
        sums[CC] = sums[GG] * scalars.grad_scale * scalars.grad_scale;  // c is g
        return;
    }
    T buffers[2][ROW];
    const T* g = open(tensors, GRADIENT, i, at, n, buffers[0]);
    const T* last = open(tensors, LAST_GRAD, i, at, n, buffers[1]);
    if (products) {
        sum_products<T>(n, g, last, sums);
        // Gradients that are nearly parallel may leave little in c.
        bool parallel = sums[GL] * sums[GL] > 0.9 * sums[GG] * sums[LL];
        if (parallel || !std::isfinite(sums[GG] + sums[LL])) sum_products<double>(n, g, last, sums);
    }
    if (corrected) {
        T scale = scalars.grad_scale, k = scalars.correction;
        sums[CC] = sum<T>(n, [=](auto type, int64_t j) {
            T scaled = g[j] * scale, c = (scaled - last[j]) * k + scaled;
            return decltype(type)(c) * decltype(type)(c);
        });
    }
}

template <class T>
void sums(const Tensors& tensors, const Scalars<double>* scalars, bool products, bool corrected, double* out,
          int64_t threads) {
    std::unique_ptr<double[]> of_rows(new double[SUMS * tensors.rows(0, tensors.count)]);
    double* rows = of_rows.get();
#pragma omp parallel num_threads(useful_threads(tensors, threads))
    share(tensors, 0, tensors.count, [&](int64_t i, int64_t at, int64_t n, int64_t row) {
        row_sums<T>(tensors, scalars[i], i, at, n, products, corrected, rows + row * SUMS);
    });
    for (int64_t i = 0; i < tensors.count; rows += tensors.rows(i++) * SUMS) {
        double factors[SUMS] = {scalars[i].grad_scale * scalars[i].grad_scale, scalars[i].grad_scale, 1, 1};
        for (int64_t sum = 0; sum < SUMS; sum++)
            out[sum * tensors.count + i] = total(rows + sum, tensors.rows(i), SUMS) * factors[sum];
    }
}

// --- update ---------------------------------------------------------------------------------------------------------

struct Options {
    Rule rule;
    bool square_gradient, stochastic;
};

template <class T>
Scalars<T> rounded(const Scalars<double>& s) {
    return {T(s.grad_scale), T(s.correction), T(s.clip_factor), T(s.one_minus_beta1),
            T(s.blend), T(s.beta2), T(s.one_minus_beta2), T(s.decay), T(s.decay_away), T(s.rate), T(s.root), T(s.eps),
            T(s.step)};
}

// NaN stays NaN.
template <class T>
T sign(T m) {
    T sign = static_cast<T>(m > 0) - static_cast<T>(m < 0);
    return m == m ? sign : m;
}

// 0 where g is: signs rest there. NaN stays NaN.
template <class T>
T moving(T m, T g) {
    return (g != 0) | (m != m) ? m : T{};
}

// Whether an update along -m takes a weight away from zero.
template <class T>
auto is_away(T m, T x) {
    return ((m > 0) & (x < 0)) | ((m < 0) & (x > 0));
}

// x parameter, e average of c, v second moment; g gradient, c corrected gradient, m first moment. One loop would read
// four or five streams of memory at once, for which processors fetch less ahead: it takes a tenth to a third longer.
template <class T, Rule RULE, bool HAS_LAST, bool IS_CAUTIOUS>
void update_block(int64_t n, Scalars<T> s, bool square_gradient, T* __restrict x, const T* __restrict gradient,
                  T* __restrict e, T* __restrict v, T* __restrict last) {
    T c[BLOCK], m[BLOCK], decays[BLOCK];
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        // c_t = g_t + k (g_t - last_t), times the clipping factor
        T g = gradient[i] * s.grad_scale;
        c[i] = (HAS_LAST ? (g - last[i]) * s.correction + g : g) * s.clip_factor;
        if constexpr (HAS_LAST) last[i] = g;
    }
    bool blends = s.blend != 0;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        // e_t = beta1 e_{t-1} + (1 - beta1) c_t
        T average = e[i] + s.one_minus_beta1 * (c[i] - e[i]);
        e[i] = average;
        m[i] = blends ? average + s.blend * (c[i] - average) : average;
        if constexpr (RULE == LION) m[i] = moving(m[i], gradient[i] * s.grad_scale);
    }
    if constexpr (IS_CAUTIOUS && RULE != MOMENTUM) {  // a test at run time would cost every step a fiftieth
#pragma omp simd
        for (int64_t i = 0; i < n; i++) decays[i] = is_away(m[i], x[i]) ? s.decay_away : s.decay;
    }
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        T decay = IS_CAUTIOUS ? decays[i] : s.decay;
        if constexpr (RULE == MOMENTUM) {
            x[i] = m[i];
        } else if constexpr (RULE == LION) {
            // x_{t+1} = x_t - lr (sign(m_t) + weight_decay x_t)
            x[i] = x[i] * decay - s.rate * sign(m[i]);
        } else {
            // v_t = beta2 v_{t-1} + (1 - beta2) c_t^2
            T squared = square_gradient ? gradient[i] * s.grad_scale : c[i];
            T second = v[i] * s.beta2 + s.one_minus_beta2 * squared * squared;
            v[i] = second;
            // x_{t+1} = x_t - lr (m_t / (1 - beta1^t) / (sqrt(v_t / (1 - beta2^t)) + eps) + weight_decay x_t)
            x[i] = x[i] * decay - s.rate * m[i] / (std::sqrt(second) * s.root + s.eps);
        }
    }
}

// Decays weights, and moves them by a step along -m.
Floats moved(Floats x, Floats m, Floats step, const Scalars<float>& s) {
    if (!s.is_cautious()) return fused(x, all(s.decay), step);
    return fused(x, is_away(m, x) ? all(s.decay_away) : all(s.decay), step);
}

// A state in 8 bits, from the beginning of a block on.
template <class Byte>
struct Coded {
    Byte* codes;
    float* scales;
};

// The same for states in 8 bits: `update_block` on n elements, a multiple of CODED, of at most BLOCK. The scales are
// part of the coefficients. Codes are written in a second loop: the largest of their block must be known.
template <Rule RULE, bool HAS_LAST>
void update_coded(int64_t n, const Scalars<float>& s, bool square_gradient, float* __restrict x,
                  const float* __restrict gradient, Coded<int8_t> e, Coded<uint8_t> v, Coded<int8_t> last,
                  const Thresholds& thresholds) {
    using Value = Code<int8_t>;
    using Root = Code<uint8_t>;
    float gradients[BLOCK], corrected[BLOCK], averages[BLOCK], blended[BLOCK], roots[BLOCK];
    float largest_gradient[BLOCK / CODED], largest_average[BLOCK / CODED], largest_square[BLOCK / CODED];
    bool blends = s.blend != 0;
    float of_gradient = s.clip_factor * (HAS_LAST ? 1 + s.correction : 1);
    for (int64_t block = 0; block < n / CODED; block++) {
        float of_last = HAS_LAST ? -s.correction * s.clip_factor * Value::unit * last.scales[block] : 0;
        float of_average = (1 - s.one_minus_beta1) * Value::unit * e.scales[block];
        float of_square = RULE == ADAMW ? s.beta2 * Root::unit * Root::unit * v.scales[block] : 0;
        Ints average_sizes{}, square_sizes{}, gradient_sizes{};
        int64_t first = block * CODED, end = first + CODED;
        for (int64_t i = first; i < end; i += WIDTH) {
            // c_t = g_t + k (g_t - last_t), times the clipping factor
            Floats g = load<Floats>(gradient + i) * s.grad_scale, c = g * of_gradient;
            if constexpr (HAS_LAST) {
                c = fused(Value::levels(last.codes + i), all(of_last), c);
                gradient_sizes = larger(gradient_sizes, Ints(g) & SIZE);
            }
            store(g, gradients + i);
            store(c, corrected + i);
        }
        for (int64_t i = first; i < end; i += WIDTH) {
            // e_t = beta1 e_{t-1} + (1 - beta1) c_t
            Floats c = load<Floats>(corrected + i);
            Floats m = fused(Value::levels(e.codes + i), all(of_average), c * s.one_minus_beta1);
            store(m, averages + i);
            average_sizes = larger(average_sizes, Ints(m) & SIZE);
        }
        const float* moments = averages;
        if (blends || RULE == LION) {
            for (int64_t i = first; i < end; i += WIDTH) {
                Floats m = load<Floats>(averages + i);
                if (blends) m += s.blend * (load<Floats>(corrected + i) - m);
                if (RULE == LION) m = moving(m, load<Floats>(gradients + i));
                store(m, blended + i);
            }
            moments = blended;
        }
        if constexpr (RULE == ADAMW) {
            const float* squared = square_gradient ? gradients : corrected;
            for (int64_t i = first; i < end; i += WIDTH) {
                // v_t = beta2 v_{t-1} + (1 - beta2) c_t^2
                Floats level = Root::levels(v.codes + i), c = load<Floats>(squared + i);
                Floats second = fused(level * level, all(of_square), s.one_minus_beta2 * c * c);
                square_sizes = larger(square_sizes, Ints(second) & SIZE);
                store(root(second), roots + i);
            }
        }
        for (int64_t i = first; i < end; i += WIDTH) {
            Floats m = load<Floats>(moments + i);
            if constexpr (RULE == MOMENTUM) {
                store(m, x + i);
            } else if constexpr (RULE == LION) {
                // x_{t+1} = x_t - lr (sign(m_t) + weight_decay x_t)
                Floats sign = m > 0 ? all(1) : m < 0 ? all(-1) : m;  // NaN stays NaN
                store(moved(load<Floats>(x + i), m, -s.rate * sign, s), x + i);
            } else {
                // x_{t+1} = x_t - lr (m_t / (1 - beta1^t) / (sqrt(v_t / (1 - beta2^t)) + eps) + weight_decay x_t)
                Floats step = -s.rate * m / fused(load<Floats>(roots + i), all(s.root), all(s.eps));
                store(moved(load<Floats>(x + i), m, step, s), x + i);
            }
        }
        largest_average[block] = largest(average_sizes);
        largest_square[block] = largest(square_sizes);
        largest_gradient[block] = largest(gradient_sizes);
    }
    for (int64_t block = 0; block < n / CODED; block++) {
        int64_t i = block * CODED;
        Value::encode(averages + i, largest_average[block], thresholds.of_values, e.codes + i, e.scales + block);
        if constexpr (RULE == ADAMW)
            Root::encode(roots + i, largest_square[block], thresholds.of_roots, v.codes + i, v.scales + block);
        if constexpr (HAS_LAST)
            Value::encode(gradients + i, largest_gradient[block], thresholds.of_values, last.codes + i,
                          last.scales + block);
    }
}

template <class T>
using Block = void (*)(int64_t, Scalars<T>, bool, T*, const T*, T*, T*, T*);

// By whether there are last gradients, and whether decay is cautious.
template <class T, Rule RULE>
constexpr Block<T> BLOCKS[2][2] = {
    {update_block<T, RULE, false, false>, update_block<T, RULE, false, true>},
    {update_block<T, RULE, true, false>, update_block<T, RULE, true, true>},
};

template <class T>
Block<T> choose_block(Rule rule, bool has_last, bool is_cautious) {
    if (rule == ADAMW) return BLOCKS<T, ADAMW>[has_last][is_cautious];
    if (rule == LION) return BLOCKS<T, LION>[has_last][is_cautious];
    return BLOCKS<T, MOMENTUM>[has_last][is_cautious];
}

using CodedBlock = decltype(&update_coded<ADAMW, true>);

CodedBlock choose_coded(Rule rule, bool has_last) {
    if (rule == ADAMW) return has_last ? update_coded<ADAMW, true> : update_coded<ADAMW, false>;
    if (rule == LION) return has_last ? update_coded<LION, true> : update_coded<LION, false>;
    return has_last ? update_coded<MOMENTUM, true> : update_coded<MOMENTUM, false>;
}

// Updates n elements from `at` on whose states are in 8 bits; a last block that is not full, as a copy.
void update_states(const Tensors& tensors, const Scalars<float>& scalars, const Options& options, int64_t i, int64_t at,
                   int64_t n, float* x, const float* gradient, const Thresholds& thresholds) {
    auto state = [&](List list, auto* type) {
        using Byte = std::remove_pointer_t<decltype(type)>;
        if (!tensors.has(list)) return Coded<Byte>{};
        return Coded<Byte>{static_cast<Byte*>(tensors.data(list, i)) + at, tensors.scales(list, i, at)};
    };
    auto e = state(EXP_AVG, (int8_t*)nullptr);
    auto v = state(EXP_AVG_SQ, (uint8_t*)nullptr);
    auto last = state(LAST_GRAD, (int8_t*)nullptr);
    auto call = choose_coded(options.rule, tensors.has(LAST_GRAD));
    int64_t rest = n % CODED, whole = n - rest, block = whole / CODED;
    call(whole, scalars, options.square_gradient, x, gradient, e, v, last, thresholds);
    if (rest == 0) return;
    auto filled = [&](auto* from) {
        std::array<std::remove_const_t<std::remove_pointer_t<decltype(from)>>, CODED> to{};
        if (from != nullptr) std::copy_n(from + whole, rest, to.begin());
        return to;
    };
    auto own_x = filled(x), own_gradient = filled(gradient);
    auto own_e = filled(e.codes), own_last = filled(last.codes);
    auto own_v = filled(v.codes);
    call(CODED, scalars, options.square_gradient, own_x.data(), own_gradient.data(), {own_e.data(), e.scales + block},
         {own_v.data(), v.scales + block}, {own_last.data(), last.scales + block}, thresholds);
    auto copy_back = [&](const auto& from, auto* to) {
        if (to != nullptr) std::copy_n(from.begin(), rest, to + whole);
    };
    copy_back(own_x, x);
    copy_back(own_e, e.codes);
    copy_back(own_v, v.codes);
    copy_back(own_last, last.codes);
}

template <class T>
void update_row(const Tensors& tensors, const Scalars<double>& scalars, const Options& options, int64_t i, int64_t row,
                int64_t elements) {
    T buffers[VALUES][BLOCK];
    Scalars<T> in_type = rounded<T>(scalars);
    bool changed[VALUES] = {true, false, true, options.rule == ADAMW, tensors.has(LAST_GRAD)};
    bool at_random = options.stochastic && tensors.type(PARAM) == BFLOAT16;
    Block<T> block = choose_block<T>(options.rule, tensors.has(LAST_GRAD), scalars.is_cautious());
    for (int64_t at = row; at < row + elements; at += BLOCK) {
        int64_t n = std::min(BLOCK, row + elements - at);
        T* values[VALUES] = {};
        for (int list = 0; list < VALUES; list++)
            if (tensors.has(List(list))) {
                bool read = list != PARAM || options.rule != MOMENTUM;
                values[list] = open(tensors, List(list), i, at, n, buffers[list], read);
            }
        block(n, in_type, options.square_gradient, values[PARAM], values[GRADIENT], values[EXP_AVG], values[EXP_AVG_SQ],
              values[LAST_GRAD]);
        for (int list = 0; list < VALUES; list++) {
            if (list == PARAM && at_random)
                close_at_random(tensors, i, at, n, values[PARAM]);
            else if (changed[list])
                close(tensors, List(list), i, at, n, values[list]);
        }
    }
}

// The same for a tensor whose states are in 8 bits.
void update_coded_row(const Tensors& tensors, const Scalars<double>& scalars, const Options& options, int64_t i,
                      int64_t row, int64_t elements) {
    float params[BLOCK], gradients[BLOCK];
    Scalars<float> in_type = rounded<float>(scalars);
    Thresholds thresholds(static_cast<int64_t>(scalars.step));
    bool at_random = options.stochastic && tensors.type(PARAM) == BFLOAT16;
    for (int64_t at = row; at < row + elements; at += BLOCK) {
        int64_t n = std::min(BLOCK, row + elements - at);
        float* x = open(tensors, PARAM, i, at, n, params, options.rule != MOMENTUM);
        float* gradient = open(tensors, GRADIENT, i, at, n, gradients);
        update_states(tensors, in_type, options, i, at, n, x, gradient, thresholds);
        if (at_random)
            close_at_random(tensors, i, at, n, x);
        else
            close(tensors, PARAM, i, at, n, x);
    }
}

// What a call clips by itself: tensors whose <g, g> is above their limit, for c may be longer than the threshold there.
struct Clip {
    const double* limits;  // one per tensor; null: the scalars have the factors
    double threshold;
    double* squares;  // <g, g>, one per tensor
    bool are_known;   // these; otherwise they are written

    bool may_clip(int64_t i, double square) const { return !(square <= limits[i]); }  // NaN may

    // Whether one pass takes <g, g> and <c, c>: no square is below such a limit.
    bool takes_both(int64_t i) const { return !are_known && limits[i] < 0; }

    // 1 / max(1, |c_t| / clip_threshold); NaN stays NaN.
    double factor(double corrected) const {
        double ratio = std::sqrt(corrected) / threshold;
        return ratio < 1 ? 1 : 1 / ratio;
    }
};

// Writes the clipping factors of the tensors from `first` to `last`. All threads share `squares` and `corrected`, <g, g>
// and <c, c> of rows; each has factors of its own, from the same totals, so all decide alike.
template <class T>
void find_factors(const Tensors& tensors, const Scalars<double>* scalars, const Clip& clip, int64_t first,
                  int64_t last, double* squares, double* corrected, double* factors) {
    constexpr double UNKNOWN = 0;
    auto take_corrected = [&](int64_t i, int64_t at, int64_t n, int64_t row) {
        double sums[SUMS];
        row_sums<T>(tensors, scalars[i], i, at, n, false, true, sums);
        corrected[row] = sums[CC];
    };
    if (!clip.are_known) {
        share(tensors, first, last, [&](int64_t i, int64_t at, int64_t n, int64_t row) {
            // <c, c> first: it reads two streams of memory at once, and leaves g in the first-level cache.
            if (clip.takes_both(i)) take_corrected(i, at, n, row);
            squares[row] = row_square<T>(tensors, i, at, n);
        });
#pragma omp barrier
    }
    bool lacks_sums = false;
    for (int64_t i = first, row = tensors.rows(0, first); i < last; row += tensors.rows(i++)) {
        double scale = scalars[i].grad_scale;
        double square = clip.are_known ? clip.squares[i] : total(squares + row, tensors.rows(i)) * scale * scale;
        if (!clip.are_known && omp_get_thread_num() == 0) clip.squares[i] = square;
        factors[i] = clip.may_clip(i, square) ? UNKNOWN : 1;
        lacks_sums |= factors[i] == UNKNOWN && !clip.takes_both(i);
    }
    if (lacks_sums) {
        share(tensors, first, last, [&](int64_t i, int64_t at, int64_t n, int64_t row) {
            if (factors[i] == UNKNOWN && !clip.takes_both(i)) take_corrected(i, at, n, row);
        });
#pragma omp barrier
    }
    for (int64_t i = first, row = tensors.rows(0, first); i < last; row += tensors.rows(i++))
        if (factors[i] == UNKNOWN) factors[i] = clip.factor(total(corrected + row, tensors.rows(i)));
}

// Updates all tensors. A call that clips goes in waves, so that gradients and last gradients are still in a cache when
// the update reads them again.
template <class T>
void update(const Tensors& tensors, const Scalars<double>* scalars, const Options& options, const Clip& clip,
            int64_t threads) {
    bool clips = clip.limits != nullptr;
    int64_t rows = clips ? tensors.rows(0, tensors.count) : 0, most = clips ? WAVE : INT64_MAX;
    std::unique_ptr<double[]> squares(new double[rows]), corrected(new double[rows]);
#pragma omp parallel num_threads(useful_threads(tensors, threads))
    {
        std::unique_ptr<double[]> factors(new double[tensors.count]);
        for (int64_t first = 0, last = 0; first < tensors.count; first = last) {
            for (int64_t size = 0; last < tensors.count && (last == first || size + tensors.size(last) <= most); last++)
                size += tensors.size(last);
            if (clips)
                find_factors<T>(tensors, scalars, clip, first, last, squares.get(), corrected.get(), factors.get());
            share(tensors, first, last, [&](int64_t i, int64_t at, int64_t n, int64_t) {
                Scalars<double> own = scalars[i];
                if (clips) own.clip_factor = factors[i];
                if constexpr (sizeof(T) == 4) {
                    if (tensors.type(EXP_AVG) == INT8) return update_coded_row(tensors, own, options, i, at, n);
                }
                update_row<T>(tensors, own, options, i, at, n);
            });
        }
    }
}

}  // namespace

// `out`: 4 x count. `limits`, `threshold`, `squares`, `are_known`: see Clip.
extern "C" void mars_sums(int64_t count, const int64_t* words, const Scalars<double>* scalars, int64_t products,
                          int64_t corrected, double* out, int64_t threads) {
    Tensors tensors{count, words};
    auto call = tensors.is_double() ? sums<double> : sums<float>;
    call(tensors, scalars, products, corrected, out, threads);
}

extern "C" void mars_update(int64_t count, const int64_t* words, const Scalars<double>* scalars, int64_t rule,
                            int64_t square_gradient, int64_t stochastic, const double* limits, double threshold,
                            double* squares, int64_t are_known, int64_t threads) {
    Tensors tensors{count, words};
    Options options{static_cast<Rule>(rule), square_gradient != 0, stochastic != 0};
    auto call = tensors.is_double() ? update<double> : update<float>;
    call(tensors, scalars, options, {limits, threshold, squares, are_known != 0}, threads);
}
