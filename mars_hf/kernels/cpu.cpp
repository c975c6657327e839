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
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>

namespace {

constexpr int64_t ROW = 4096;
constexpr int64_t BLOCK = 256;
// Elements above which more threads pay off; PyTorch's value.
constexpr int64_t GRAIN = 32768;
// Elements whose gradients stay in a cache between their sums and their update, unless one tensor has more.
constexpr int64_t WAVE = 1 << 20;

enum List { PARAM, GRADIENT, EXP_AVG, EXP_AVG_SQ, LAST_GRAD, LISTS };
enum Type { ABSENT, BFLOAT16, FLOAT32, FLOAT64 };
enum Rule { ADAMW, LION, MOMENTUM };
enum Sum { GG, GL, LL, CC, SUMS };

// In the order of SCALARS in cpu.py. decay = 1 - lr weight_decay, rate = lr / (1 - beta1^t),
// root = 1 / sqrt(1 - beta2^t); rate is lr for other rules. Those of the caller are in double.
template <class T>
struct Scalars {
    T scale, correction, clip_factor, one_minus_beta1, nesterov, beta2, one_minus_beta2, decay, rate, root;
    T eps;
};

struct Tensors {
    int64_t count;
    const int64_t* words;

    Type type(List list) const { return static_cast<Type>(words[list]); }
    void* data(List list, int64_t i) const { return reinterpret_cast<void*>(words[LISTS + list * count + i]); }
    int64_t size(int64_t i) const { return words[LISTS + LISTS * count + i]; }
    uint64_t seed(int64_t i) const { return static_cast<uint64_t>(words[LISTS + (LISTS + 1) * count + i]); }
    int64_t rows(int64_t i) const { return (size(i) + ROW - 1) / ROW; }
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

// Returns n elements from `at` on in the type of the arithmetic: in place, or converted into `buffer`.
template <class T>
T* open(const Tensors& tensors, List list, int64_t i, int64_t at, int64_t n, T* buffer, bool read = true) {
    void* data = tensors.data(list, i);
    Type type = tensors.type(list);
    if (type == type_of<T>) return static_cast<T*>(data) + at;
    if (!read) return buffer;
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
        sums[CC] = sums[GG] * scalars.scale * scalars.scale;  // c is g
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
        T scale = scalars.scale, k = scalars.correction;
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
        double factors[SUMS] = {scalars[i].scale * scalars[i].scale, scalars[i].scale, 1, 1};
        for (int64_t sum = 0; sum < SUMS; sum++)
            out[sum * tensors.count + i] = total(rows + sum, tensors.rows(i), SUMS) * factors[sum];
    }
}

// --- update ---------------------------------------------------------------------------------------------------------

// A tensor's units (see resting.py): element i belongs to unit (i + shift) / stride % count; its flag is at first + unit.
struct Units {
    int64_t first, count, stride, shift;
};

// Which units move, of all tensors; without flags all do.
struct Moving {
    const Units* units;
    const float* flags;

    // Writes 0 or 1 for each of n elements from `at` on.
    template <class T>
    void spread(int64_t i, int64_t at, int64_t n, T* to) const {
        Units u = units[i];
        for (int64_t j = 0; j < n; j++) to[j] = flags[u.first + (u.shift + at + j) / u.stride % u.count];
    }
};

struct Options {
    Rule rule;
    bool square_gradient, stochastic;
    Moving moving;
};

template <class T>
Scalars<T> rounded(const Scalars<double>& s) {
    return {T(s.scale), T(s.correction), T(s.clip_factor), T(s.one_minus_beta1),
            T(s.nesterov), T(s.beta2), T(s.one_minus_beta2), T(s.decay), T(s.rate), T(s.root), T(s.eps)};
}

// x parameter, e average of c, v second moment; g gradient, c corrected gradient, m first moment. One loop would read
// four or five streams of memory at once, for which processors fetch less ahead: it takes a tenth to a third longer.
template <class T, Rule RULE, bool HAS_LAST, bool RESTS>
void update_block(int64_t n, Scalars<T> s, bool square_gradient, T* __restrict x, const T* __restrict gradient,
                  T* __restrict e, T* __restrict v, T* __restrict last, const T* moving) {
    T c[BLOCK], m[BLOCK];
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        // c_t = g_t + k (g_t - last_t), times the clipping factor
        T g = gradient[i] * s.scale;
        c[i] = (HAS_LAST ? (g - last[i]) * s.correction + g : g) * s.clip_factor;
        if constexpr (HAS_LAST) last[i] = g;
    }
    bool is_nesterov = s.nesterov != 0;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        // e_t = beta1 e_{t-1} + (1 - beta1) c_t
        T average = e[i] + s.one_minus_beta1 * (c[i] - e[i]);
        e[i] = average;
        m[i] = is_nesterov ? average + s.nesterov * (c[i] - average) : average;
    }
    if constexpr (RESTS) {  // a test at run time would cost every step a fiftieth
#pragma omp simd
        for (int64_t i = 0; i < n; i++) m[i] *= moving[i];
    }
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        if constexpr (RULE == MOMENTUM) {
            x[i] = m[i];
        } else if constexpr (RULE == LION) {
            // x_{t+1} = x_t - lr (sign(m_t) + weight_decay x_t)
            T sign = static_cast<T>(m[i] > 0) - static_cast<T>(m[i] < 0);
            x[i] = x[i] * s.decay - s.rate * (m[i] == m[i] ? sign : m[i]);  // NaN stays NaN
        } else {
            // v_t = beta2 v_{t-1} + (1 - beta2) c_t^2
            T squared = square_gradient ? gradient[i] * s.scale : c[i];
            T second = v[i] * s.beta2 + s.one_minus_beta2 * squared * squared;
            v[i] = second;
            // x_{t+1} = x_t - lr (m_t / (1 - beta1^t) / (sqrt(v_t / (1 - beta2^t)) + eps) + weight_decay x_t)
            x[i] = x[i] * s.decay - s.rate * m[i] / (std::sqrt(second) * s.root + s.eps);
        }
    }
}

template <class T>
using Block = void (*)(int64_t, Scalars<T>, bool, T*, const T*, T*, T*, T*, const T*);

// By whether there are last gradients, and whether something rests.
template <class T, Rule RULE>
constexpr Block<T> BLOCKS[2][2] = {
    {update_block<T, RULE, false, false>, update_block<T, RULE, false, true>},
    {update_block<T, RULE, true, false>, update_block<T, RULE, true, true>},
};

template <class T>
Block<T> choose_block(Rule rule, bool has_last, bool rests) {
    if (rule == ADAMW) return BLOCKS<T, ADAMW>[has_last][rests];
    if (rule == LION) return BLOCKS<T, LION>[has_last][rests];
    return BLOCKS<T, MOMENTUM>[has_last][rests];
}

template <class T>
void update_row(const Tensors& tensors, const Scalars<double>& scalars, const Options& options, int64_t i, int64_t row,
                int64_t elements) {
    T buffers[LISTS][BLOCK], moves[BLOCK];
    Scalars<T> in_type = rounded<T>(scalars);
    bool changed[LISTS] = {true, false, true, options.rule == ADAMW, tensors.has(LAST_GRAD)};
    bool at_random = options.stochastic && tensors.type(PARAM) == BFLOAT16, rests = options.moving.flags != nullptr;
    Block<T> block = choose_block<T>(options.rule, tensors.has(LAST_GRAD), rests);
    for (int64_t at = row; at < row + elements; at += BLOCK) {
        int64_t n = std::min(BLOCK, row + elements - at);
        T* values[LISTS] = {};
        for (int list = 0; list < LISTS; list++)
            if (tensors.has(List(list))) {
                bool read = list != PARAM || options.rule != MOMENTUM;
                values[list] = open(tensors, List(list), i, at, n, buffers[list], read);
            }
        if (rests) options.moving.spread(i, at, n, moves);
        block(n, in_type, options.square_gradient, values[PARAM], values[GRADIENT], values[EXP_AVG], values[EXP_AVG_SQ],
              values[LAST_GRAD], moves);
        for (int list = 0; list < LISTS; list++) {
            if (list == PARAM && at_random)
                close_at_random(tensors, i, at, n, values[PARAM]);
            else if (changed[list])
                close(tensors, List(list), i, at, n, values[list]);
        }
    }
}

// Without limits, updates all tensors; with them, those where <g, g> is at most the limit. Unless these squares are known,
// it takes them: in waves, so that a gradient is still in a cache when the update reads it again.
template <class T>
void update(const Tensors& tensors, const Scalars<double>* scalars, const Options& options, const double* limits,
            bool are_known, double* squares, int64_t threads) {
    std::unique_ptr<double[]> of_rows(new double[tensors.rows(0, tensors.count)]);
    double* rows = of_rows.get();
    bool takes_squares = limits != nullptr && !are_known;
    int64_t most = takes_squares ? WAVE : INT64_MAX;
#pragma omp parallel num_threads(useful_threads(tensors, threads))
    for (int64_t first = 0, last = 0; first < tensors.count; first = last) {
        for (int64_t size = 0; last < tensors.count && (last == first || size + tensors.size(last) <= most); last++)
            size += tensors.size(last);
        if (takes_squares) {
            share(tensors, first, last, [&](int64_t i, int64_t at, int64_t n, int64_t row) {
                rows[row] = row_square<T>(tensors, i, at, n);
            });
#pragma omp barrier
        }
        int64_t current = -1;
        bool is_below = true;
        share(tensors, first, last, [&](int64_t i, int64_t at, int64_t n, int64_t row) {
            if (limits != nullptr && current != i) {
                double scale = scalars[i].scale, square = squares[i];
                if (takes_squares) square = total(rows + row - at / ROW, tensors.rows(i)) * scale * scale;
                if (takes_squares && at == 0) squares[i] = square;
                current = i, is_below = square <= limits[i];
            }
            if (is_below) update_row<T>(tensors, scalars[i], options, i, at, n);
        });
    }
}

}  // namespace

// `out`: 4 x count. `limits` and `squares`: one per tensor, or null to update all. `units`: one per tensor, with `flags`,
// or both null if nothing rests.
extern "C" void mars_sums(int64_t count, const int64_t* words, const Scalars<double>* scalars, int64_t products,
                          int64_t corrected, double* out, int64_t threads) {
    Tensors tensors{count, words};
    auto call = tensors.is_double() ? sums<double> : sums<float>;
    call(tensors, scalars, products, corrected, out, threads);
}

extern "C" void mars_update(int64_t count, const int64_t* words, const Scalars<double>* scalars, int64_t rule,
                            int64_t square_gradient, int64_t stochastic, const double* limits,
                            int64_t are_known, double* squares, const Units* units, const float* flags,
                            int64_t threads) {
    Tensors tensors{count, words};
    Options options{static_cast<Rule>(rule), square_gradient != 0, stochastic != 0, {units, flags}};
    auto call = tensors.is_double() ? update<double> : update<float>;
    call(tensors, scalars, options, limits, are_known != 0, squares, threads);
}
