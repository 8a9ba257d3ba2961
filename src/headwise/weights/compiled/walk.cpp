// One walk over attention weights on the CPU, which never writes scores to memory.
//
// A weight is exp(score − normalizer), score = cap(scale · q·k) − slope · |position − key| + bias of the key. The walk goes
// over heads and blocks of keys, then strips of queries, then tiles of TILE_ROWS queries × PANEL keys. A tile is one product in
// registers; every statistic adds what it needs of the tile while it is in the cache. Sums over keys are kept lane by
// lane for one block of keys and sums over queries for one strip, both in float32; beyond that, queries are summed in
// float64. So what is added up in which order depends on the sizes alone, not on the number of threads.
//
// Compared with the reference: the same score and softmax; the exponential function is within 2 units in the last place.
// Limits: float32, heads of any width, masks that are a `Rule`. Everything else is computed by weights/tiles.py.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16, TILE_ROWS = 8;
#elif defined(__AVX__)
constexpr int LANES = 8, TILE_ROWS = 4;
#else
constexpr int LANES = 4, TILE_ROWS = 4;
#endif
constexpr int VECTORS = 2, PANEL = VECTORS * LANES;  // keys of a tile
constexpr int BLOCK = 512;                           // keys that are packed at a time
constexpr int STRIP = 64;                            // queries whose sums stay in the cache
constexpr int MOST_OCTAVES = 32;
constexpr float HIDDEN = -1e30f;  // log of a hidden weight: finite, so that exp(HIDDEN) · HIDDEN is 0 and not NaN

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));

static inline Floats all(float x) { return Floats{} + x; }
static inline Ints all(int32_t x) { return Ints{} + x; }
static inline Floats bits(Ints x) { return reinterpret_cast<Floats>(x); }
static inline Ints bits(Floats x) { return reinterpret_cast<Ints>(x); }
static inline Floats where(Ints mask, Floats a, Floats b) { return bits((bits(a) & mask) | (bits(b) & ~mask)); }
static inline Floats larger(Floats a, Floats b) { return where(a > b, a, b); }
static inline Floats absolute(Floats x) { return bits(bits(x) & 0x7fffffff); }
template <typename Vector, typename T> static inline Vector load(const T *from) {
    Vector x;
    std::memcpy(&x, from, sizeof x);
    return x;
}
static inline float sum(Floats x) {
    float total = 0;
    for (int i = 0; i < LANES; i++) total += x[i];
    return total;
}
static inline uint32_t lanes_of(Ints mask) {  // one bit for each lane
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask(reinterpret_cast<__m512i>(mask), reinterpret_cast<__m512i>(mask));
#else
    uint32_t found = 0;
    for (int i = 0; i < LANES; i++) found |= uint32_t(mask[i] & 1) << i;
    return found;
#endif
}
static inline Ints counted(int32_t first) {  // first, first + 1, ...
    Ints x;
    for (int i = 0; i < LANES; i++) x[i] = first + i;
    return x;
}

// exp(x) for x up to 88, with the polynomial of the Cephes library; 0 below −87.
static inline Floats exponential(Floats x) {
    Floats least = all(-87.0f), magic = all(12582912.0f);  // 1.5 · 2²³: adding it rounds to a whole number
    Floats t = where(x < least, least, x);
    Floats shifted = t * 1.44269504f + magic, n = shifted - magic;
    Floats r = t - n * 0.693359375f + n * 2.12194440e-4f;
    Floats p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    Ints power = (bits(shifted) - bits(magic)) << 23;
    return bits((bits(p) + power) & ~(x < least));
}

static inline Floats hyperbolic_tangent(Floats x) {
    Floats z = x * x, e = exponential(absolute(x) * -2.0f);
    Floats p = all(-5.70498872745e-3f);
    p = p * z + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    Floats small = p * z * x + x, large = (1.0f - e) / (1.0f + e);
    large = bits(bits(large) | (bits(x) & int32_t(0x80000000)));
    return where(absolute(x) < 0.625f, small, large);
}

extern "C" {

// Which keys a query sees: (within the band, or an open key) and an allowed key, the same document and a match, and
// within [first, stop). A query at position p sees key j of the band if p − left <= j <= p + right. Tables are
// (samples, stride), with at least PANEL numbers after the last key; a stride of 0 means one for all samples.
struct Rule {
    int64_t left, right, first, stop;
    const int32_t *keys, *open, *documents, *asked, *offered;
    int64_t keys_stride, open_stride, documents_stride, asked_stride, offered_stride;
};

struct Probe {
    Rule rule;
    float *mass;  // (heads, T)
};

struct Column {
    const float *weights;  // (heads, T), what each query counts; null counts each once
    double *total;         // (chunks, heads, S), or null
};

struct Picture {
    int64_t column;                     // the column statistic it is made of, or −1 for the largest weights
    int64_t rows, cols;                 // its size
    int64_t first, stop;                // the keys that fall into it
    const int32_t *row_cell, *col_cell;  // (T) and (S + PANEL): where queries and keys fall; −1 outside
    double *cells;                      // (heads, rows, cols); chunk c of the queries writes c rows lower
};

struct Walk {
    const float *query, *key, *normalizer;  // normalizer (heads, T), or null for raw scores
    const int32_t *position;                // (T), of the queries among the keys
    const float *slopes;                    // (H), or null
    const float *key_bias;                  // (heads, S + PANEL), added to the scores of a key, or null
    int64_t query_batch, query_head, query_row, key_batch, key_head, key_row;  // strides
    int64_t B, H, group, T, S, D;
    float scale, softcap;
    Rule mask;
    // Row statistics, each (heads, T) or null.
    float *mass, *entropy, *distance, *best, *running_max, *running_sum;
    int64_t *best_key;
    int64_t top;  // the largest weights: (heads, T, top)
    float *top_best;
    int64_t *top_key;
    int64_t octaves;
    double *histogram;  // (chunks, heads, octaves)
    int64_t probe_count, column_count, picture_count;
    const Probe *probes;
    const Column *columns;
    const Picture *pictures;
    int64_t chunk, threads;  // rows of one task
};

int64_t headwise_version() { return 1; }
int64_t headwise_lanes() { return LANES; }
int64_t headwise_panel() { return PANEL; }

}  // extern "C"

enum State { NONE, SOME, EVERY };

// What a rule says about one panel of keys and one strip of queries, apart from its band.
struct PanelRule {
    State tables;
    bool open;
};

static inline const int32_t *of_sample(const int32_t *table, int64_t stride, int64_t batch) {
    return table ? table + stride * batch : nullptr;
}

// A rule for one sample.
struct Sight {
    int32_t left, right, first, stop;
    const int32_t *keys, *open, *documents, *asked, *offered;
    int64_t S;

    Sight() = default;
    Sight(const Rule &rule, int64_t batch, int64_t S)
        : left(rule.left), right(rule.right), first(rule.first), stop(rule.stop),
          keys(of_sample(rule.keys, rule.keys_stride, batch)), open(of_sample(rule.open, rule.open_stride, batch)),
          documents(of_sample(rule.documents, rule.documents_stride, batch)),
          asked(of_sample(rule.asked, rule.asked_stride, batch)),
          offered(of_sample(rule.offered, rule.offered_stride, batch)), S(S) {}

    int32_t document(int32_t p) const { return p >= 0 && p < S ? documents[p] : INT32_MIN; }
    int32_t question(int32_t p) const { return asked[std::clamp<int64_t>(p, 0, S - 1)]; }

    PanelRule look(int32_t j, const int32_t *positions, int rows) const {
        PanelRule found{EVERY, false};
        if (j >= stop || j + PANEL <= first) return {NONE, false};
        if (j < first || j + PANEL > stop) found.tables = SOME;
        if (keys) {
            int seen = 0;
            for (int i = 0; i < PANEL; i++) seen += keys[j + i] != 0;
            if (seen == 0) return {NONE, false};
            if (seen < PANEL) found.tables = SOME;
        }
        if (open)
            for (int i = 0; i < PANEL; i++) found.open |= open[j + i] != 0;
        if (documents) {
            int32_t low = INT32_MAX, high = INT32_MIN, least = INT32_MAX, most = INT32_MIN;
            for (int i = 0; i < PANEL; i++) low = std::min(low, documents[j + i]), high = std::max(high, documents[j + i]);
            for (int r = 0; r < rows; r++) {
                int32_t own = document(positions[r]);
                least = std::min(least, own), most = std::max(most, own);
            }
            if (most < low || least > high) return {NONE, false};
            if (!(low == high && least == most)) found.tables = SOME;
        }
        if (asked) found.tables = SOME;
        return found;
    }

    State band(const PanelRule &panel, int32_t j, int32_t low, int32_t high) const {  // positions from low to high
        if (panel.tables == NONE) return NONE;
        bool whole = j >= high - left && j + PANEL - 1 <= low + right;
        if (whole) return panel.tables;
        if (!panel.open && (j + PANEL - 1 < low - left || j > high + right)) return NONE;
        return SOME;
    }

    Ints lanes(int32_t p, int32_t j) const {
        Ints key = counted(j), seen = (key >= p - left) & (key <= p + right);
        if (open) seen |= load<Ints>(open + j) != 0;
        if (keys) seen &= load<Ints>(keys + j) != 0;
        if (documents) seen &= load<Ints>(documents + j) == document(p);
        if (asked) seen &= load<Ints>(offered + j) == question(p);
        return seen & (key >= first) & (key < stop);
    }
};

static inline int octave(int32_t distance) { return distance ? 32 - __builtin_clz(distance) : 0; }

// The part of a walk that one thread does for one head and one chunk of queries.
struct Worker {
    const Walk &walk;
    std::vector<float> keys, queries;
    std::vector<Floats> probe_sums, column_sums;
    std::vector<Sight> probes;
    std::vector<PanelRule> probe_panels;
    Floats mass[STRIP], entropy[STRIP], distance[STRIP], best[STRIP], running_max[STRIP], running_sum[STRIP];
    Ints best_key[STRIP];
    Floats octaves[MOST_OCTAVES];
    Floats logs[TILE_ROWS][VECTORS], weights[TILE_ROWS][VECTORS], column_best[VECTORS];
    Sight mask;
    PanelRule mask_panel;
    bool peaks = false, everywhere;  // everywhere: some statistic needs all keys
    int64_t flat, chunk, heads;  // the head among those of all samples, and the chunk of queries
    int strip_rows;
    const int32_t *positions;
    const float *normalizers;
    float slope;
    const float *key_bias;  // of the head

    explicit Worker(const Walk &walk)
        : walk(walk), keys(BLOCK * walk.D), queries(STRIP * walk.D), probe_sums(walk.probe_count * STRIP),
          column_sums(walk.column_count * VECTORS), probes(walk.probe_count), probe_panels(walk.probe_count),
          heads(walk.B * walk.H) {
        for (int64_t i = 0; i < walk.picture_count; i++) peaks |= walk.pictures[i].column < 0;
        everywhere = walk.mass || walk.entropy || walk.distance || walk.best || walk.running_max || walk.top ||
                     walk.histogram;
        for (int64_t i = 0; i < walk.column_count; i++) everywhere |= walk.columns[i].total != nullptr;
    }

    // Whether some statistic needs keys from j to end − 1 for queries at positions from low to high.
    bool wanted(int64_t low, int64_t high, int64_t j, int64_t end) const {
        if (everywhere) return true;
        for (const Sight &probe : probes)
            if (j < probe.stop && end > probe.first &&
                (probe.open || (end > low - probe.left && j <= high + probe.right)))
                return true;
        for (int64_t i = 0; i < walk.picture_count; i++)
            if (j < walk.pictures[i].stop && end > walk.pictures[i].first) return true;
        return false;
    }

    int64_t chunks() const { return (walk.T + walk.chunk - 1) / walk.chunk; }

    void run(int64_t task) {
        flat = task % heads, chunk = chunks() - 1 - task / heads;  // the last queries see most

        int64_t batch = flat / walk.H, head = flat % walk.H;
        mask = Sight(walk.mask, batch, walk.S);
        for (int64_t i = 0; i < walk.probe_count; i++) probes[i] = Sight(walk.probes[i].rule, batch, walk.S);
        slope = walk.slopes ? walk.slopes[head] : 0.0f;
        key_bias = walk.key_bias ? walk.key_bias + flat * (walk.S + PANEL) : nullptr;
        const float *query = walk.query + batch * walk.query_batch + head * walk.query_head;
        const float *key = walk.key + batch * walk.key_batch + head / walk.group * walk.key_head;
        int64_t start = chunk * walk.chunk, end = std::min(start + walk.chunk, walk.T);
        for (int64_t first = 0; first < walk.S; first += BLOCK) {
            int64_t stop = std::min<int64_t>(first + BLOCK, walk.S);
            bool packed = false;
            for (int64_t row = start; row < end;) {
                int64_t next = strip_end(row, end);
                if (reaches(row, next, first, stop)) {
                    if (!packed) pack_keys(key, first, stop), packed = true;
                    strip(query, row, next, first, stop);
                }
                row = next;
            }
        }
    }

    // The end of the strip that begins at `row`: all its queries fall into the same row of every picture.
    int64_t strip_end(int64_t row, int64_t end) const {
        end = std::min<int64_t>(row + STRIP, end);
        for (int64_t i = 0; i < walk.picture_count; i++) {
            const int32_t *cell = walk.pictures[i].row_cell;
            if (cell[end - 1] == cell[row]) continue;  // they increase
            end = std::upper_bound(cell + row, cell + end, cell[row]) - cell;
        }
        return end;
    }

    bool reaches(int64_t row, int64_t end, int64_t first, int64_t stop) const {
        auto [low, high] = std::minmax_element(walk.position + row, walk.position + end);
        bool visible = mask.open || (stop > *low - mask.left && first <= *high + mask.right);
        return visible && first < mask.stop && stop > mask.first && wanted(*low, *high, first, stop);
    }

    void pack_keys(const float *key, int64_t first, int64_t stop) {  // (panels, D, PANEL)
        for (int64_t j = first; j < first + BLOCK && j < stop; j += PANEL) {
            float *panel = keys.data() + (j - first) * walk.D;
            for (int64_t i = 0; i < PANEL; i++)
                for (int64_t d = 0; d < walk.D; d++)
                    panel[d * PANEL + i] = j + i < stop ? key[(j + i) * walk.key_row + d] : 0.0f;
        }
    }

    void pack_queries(const float *query, int64_t row) {  // (tiles, D, rows of the tile)
        for (int r = 0; r < strip_rows;) {
            int height = tile_rows(r);
            float *tile = queries.data() + r * walk.D;
            for (int i = 0; i < height; i++)
                for (int64_t d = 0; d < walk.D; d++) tile[d * height + i] = query[(row + r + i) * walk.query_row + d];
            r += height;
        }
    }

    int tile_rows(int r) const {  // a power of two
        int height = TILE_ROWS;
        while (height > strip_rows - r) height /= 2;
        return height;
    }

    void strip(const float *query, int64_t row, int64_t end, int64_t first, int64_t stop) {
        strip_rows = end - row;
        positions = walk.position + row;
        normalizers = walk.normalizer ? walk.normalizer + flat * walk.T + row : nullptr;
        pack_queries(query, row);
        for (int r = 0; r < strip_rows; r++) {
            mass[r] = entropy[r] = distance[r] = running_sum[r] = Floats{};
            best[r] = running_max[r] = all(HIDDEN);
            best_key[r] = all(int32_t(-1));
        }
        if (walk.histogram) std::fill(octaves, octaves + walk.octaves, Floats{});
        std::fill(probe_sums.begin(), probe_sums.end(), Floats{});
        for (int64_t j = first; j < stop; j += PANEL) panel(row, j, keys.data() + (j - first) * walk.D);
        finish_rows(row);
    }

    void panel(int64_t row, int64_t j, const float *packed) {
        mask_panel = mask.look(j, positions, strip_rows);
        if (mask_panel.tables == NONE) return;
        for (int64_t i = 0; i < walk.probe_count; i++) probe_panels[i] = probes[i].look(j, positions, strip_rows);
        std::fill(column_sums.begin(), column_sums.end(), Floats{});
        for (Floats &x : column_best) x = Floats{};
        bool seen = false;
        for (int r = 0; r < strip_rows;) {
            int height = tile_rows(r);
            if (height == TILE_ROWS) seen |= tile<TILE_ROWS>(row, r, j, packed);
            else if (height == 4) seen |= tile<4>(row, r, j, packed);
            else if (height == 2) seen |= tile<2>(row, r, j, packed);
            else seen |= tile<1>(row, r, j, packed);
            r += height;
        }
        if (seen) finish_columns(row, j);
    }

    template <int ROWS> static void product(const float *tile, const float *panel, int64_t D, Floats (*found)[VECTORS]) {
        Floats sums[ROWS][VECTORS] = {};
        for (int64_t d = 0; d < D; d++, tile += ROWS, panel += PANEL) {
            Floats a = load<Floats>(panel), b = load<Floats>(panel + LANES);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                sums[r][0] += tile[r] * a;
                sums[r][1] += tile[r] * b;
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) found[r][0] = sums[r][0], found[r][1] = sums[r][1];
    }

    // One tile: its scores and weights, and then every statistic of them. Returns whether anything in it is visible.
    template <int ROWS> bool tile(int64_t row, int r, int32_t j, const float *panel) {
        auto [low, high] = std::minmax_element(positions + r, positions + r + ROWS);
        State state = mask.band(mask_panel, j, *low, *high);
        if (state == NONE || !wanted(*low, *high, j, j + PANEL)) return false;
        product<ROWS>(queries.data() + r * walk.D, panel, walk.D, logs);
        score<ROWS>(r, j, state);
        if (walk.running_max) normalize<ROWS>(r);
        if (walk.mass)
            for (int i = 0; i < ROWS; i++) mass[r + i] += weights[i][0] + weights[i][1];
        if (walk.entropy)
            for (int i = 0; i < ROWS; i++)
                entropy[r + i] -= weights[i][0] * logs[i][0] + weights[i][1] * logs[i][1];
        if (walk.distance) add_distance<ROWS>(r, j);
        if (walk.best) raise_best<ROWS>(r, j);
        if (walk.top) raise_top<ROWS>(row + r, j);
        if (walk.histogram) add_octaves<ROWS>(r, j);
        for (int64_t p = 0; p < walk.probe_count; p++) {
            State within = probes[p].band(probe_panels[p], j, *low, *high);
            if (within != NONE) add_probe<ROWS>(p, r, j, within);
        }
        for (int64_t c = 0; c < walk.column_count; c++) add_column<ROWS>(c, row + r);
        if (peaks)
            for (int v = 0; v < VECTORS; v++)
                for (int i = 0; i < ROWS; i++) column_best[v] = larger(weights[i][v], column_best[v]);
        return true;
    }

    template <int ROWS> void score(int r, int32_t j, State state) {
        bool plain = walk.softcap == 0.0f && !walk.slopes && !walk.key_bias;
        for (int i = 0; i < ROWS; i++) {
            float norm = normalizers ? normalizers[r + i] : 0.0f;
            for (int v = 0; v < VECTORS; v++) {
                Floats x = logs[i][v];
                x = plain ? x * walk.scale - norm : adjusted(x, positions[r + i], j + v * LANES) - norm;
                Floats w = normalizers ? exponential(x) : Floats{};  // without it, only the normalizer is wanted
                if (state == SOME) {
                    Ints seen = mask.lanes(positions[r + i], j + v * LANES);
                    x = where(seen, x, all(HIDDEN)), w = bits(bits(w) & seen);
                }
                logs[i][v] = x, weights[i][v] = w;
            }
        }
    }

    Floats adjusted(Floats product, int32_t p, int32_t j) const {
        Floats x = product * walk.scale;
        if (walk.softcap != 0.0f) x = walk.softcap * hyperbolic_tangent(x / walk.softcap);
        if (walk.slopes) x -= slope * away(p, j);
        return walk.key_bias ? x + load<Floats>(key_bias + j) : x;
    }

    static Floats away(int32_t p, int32_t j) { return absolute(__builtin_convertvector(p - counted(j), Floats)); }

    template <int ROWS> void normalize(int r) {
        for (int i = 0; i < ROWS; i++) {
            Floats top = larger(logs[i][0], logs[i][1]), before = running_max[r + i], now = larger(before, top);
            Floats added = running_sum[r + i] * exponential(before - now);
            for (Floats x : logs[i]) added += bits(bits(exponential(x - now)) & (x > HIDDEN));
            running_max[r + i] = now, running_sum[r + i] = added;
        }
    }

    template <int ROWS> void add_distance(int r, int32_t j) {
        for (int i = 0; i < ROWS; i++)
            for (int v = 0; v < VECTORS; v++)
                distance[r + i] += weights[i][v] * away(positions[r + i], j + v * LANES);
    }

    template <int ROWS> void raise_best(int r, int32_t j) {
        for (int i = 0; i < ROWS; i++)
            for (int v = 0; v < VECTORS; v++) {
                Ints better = logs[i][v] > best[r + i];
                best[r + i] = where(better, logs[i][v], best[r + i]);
                best_key[r + i] = (counted(j + v * LANES) & better) | (best_key[r + i] & ~better);
            }
    }

    template <int ROWS> void raise_top(int64_t row, int32_t j) {
        for (int i = 0; i < ROWS; i++) {
            float *found = walk.top_best + (flat * walk.T + row + i) * walk.top;
            int64_t *key = walk.top_key + (flat * walk.T + row + i) * walk.top;
            const float *x = reinterpret_cast<const float *>(logs[i]);
            for (int v = 0; v < VECTORS; v++)
                for (uint32_t left = lanes_of(logs[i][v] > found[walk.top - 1]); left; left &= left - 1) {
                    int lane = v * LANES + __builtin_ctz(left);
                    if (x[lane] > found[walk.top - 1]) insert(found, key, x[lane], j + lane);
                }
        }
    }

    void insert(float *found, int64_t *key, float x, int64_t j) const {  // in decreasing order
        int64_t place = walk.top - 1;
        for (; place > 0 && found[place - 1] < x; place--) found[place] = found[place - 1], key[place] = key[place - 1];
        found[place] = x, key[place] = j;
    }

    template <int ROWS> void add_octaves(int r, int32_t j) {
        for (int i = 0; i < ROWS; i++) {
            int32_t p = positions[r + i], ends[2] = {std::abs(p - j), std::abs(p - j - PANEL + 1)};
            int low = p >= j && p < j + PANEL ? 0 : octave(std::min(ends[0], ends[1]));
            int high = octave(std::max(ends[0], ends[1]));
            if (low == high) {
                octaves[low] += weights[i][0] + weights[i][1];
                continue;
            }
            for (int v = 0; v < VECTORS; v++) {
                Ints signs = p - counted(j + v * LANES), apart = signs < 0 ? -signs : signs;
                for (int o = low; o <= high && o < walk.octaves; o++) {
                    Ints inside = (apart >= (o ? 1 << (o - 1) : 0)) & (apart < 1 << o);
                    octaves[o] += bits(bits(weights[i][v]) & inside);
                }
            }
        }
    }

    template <int ROWS> void add_probe(int64_t p, int r, int32_t j, State within) {
        Floats *sums = probe_sums.data() + p * STRIP + r;
        for (int i = 0; i < ROWS; i++)
            for (int v = 0; v < VECTORS; v++) {
                Floats w = weights[i][v];
                if (within == SOME) w = bits(bits(w) & probes[p].lanes(positions[r + i], j + v * LANES));
                sums[i] += w;
            }
    }

    template <int ROWS> void add_column(int64_t c, int64_t row) {
        const float *counts = walk.columns[c].weights ? walk.columns[c].weights + flat * walk.T + row : nullptr;
        for (int v = 0; v < VECTORS; v++) {
            Floats total = column_sums[c * VECTORS + v];
            for (int i = 0; i < ROWS; i++) total += counts ? weights[i][v] * counts[i] : weights[i][v];
            column_sums[c * VECTORS + v] = total;
        }
    }

    void finish_rows(int64_t row) {
        int64_t first = flat * walk.T + row;
        for (int r = 0; r < strip_rows; r++) {
            if (walk.mass) walk.mass[first + r] += sum(mass[r]);
            if (walk.entropy) walk.entropy[first + r] += sum(entropy[r]);
            if (walk.distance) walk.distance[first + r] += sum(distance[r]);
            if (walk.best) finish_best(first + r, r);
            if (walk.running_max) finish_normalizer(first + r, r);
            for (int64_t p = 0; p < walk.probe_count; p++) walk.probes[p].mass[first + r] += sum(probe_sums[p * STRIP + r]);
        }
        if (walk.histogram) {
            double *found = walk.histogram + (chunk * heads + flat) * walk.octaves;
            for (int64_t o = 0; o < walk.octaves; o++)
                for (int i = 0; i < LANES; i++) found[o] += octaves[o][i];
        }
    }

    void finish_best(int64_t place, int r) {
        float &found = walk.best[place];
        int64_t &key = walk.best_key[place];
        for (int i = 0; i < LANES; i++) {
            float x = best[r][i];
            if (x > found || (x == found && best_key[r][i] >= 0 && (key < 0 || best_key[r][i] < key)))
                found = x, key = best_key[r][i];
        }
    }

    void finish_normalizer(int64_t place, int r) {
        float &top = walk.running_max[place], &total = walk.running_sum[place];
        for (int i = 0; i < LANES; i++) {
            float x = running_max[r][i], now = std::max(top, x);
            if (running_sum[r][i] == 0.0f) continue;
            total = total * std::exp(top - now) + running_sum[r][i] * std::exp(x - now), top = now;
        }
    }

    void finish_columns(int64_t row, int64_t j) {
        int64_t count = std::min<int64_t>(PANEL, walk.S - j), place = chunk * heads + flat;
        const float *sums = reinterpret_cast<const float *>(column_sums.data());
        for (int64_t c = 0; c < walk.column_count; c++) {
            double *total = walk.columns[c].total ? walk.columns[c].total + place * walk.S + j : nullptr;
            for (int64_t i = 0; total && i < count; i++) total[i] += sums[c * PANEL + i];
        }
        for (int64_t p = 0; p < walk.picture_count; p++) {
            const Picture &picture = walk.pictures[p];
            double *cells = picture.cells + (flat * picture.rows + picture.row_cell[row] + chunk) * picture.cols;
            const float *from = picture.column < 0 ? reinterpret_cast<const float *>(column_best)
                                                   : sums + picture.column * PANEL;
            for (int64_t i = 0; i < count; i++) {
                int32_t cell = picture.col_cell[j + i];
                if (cell < 0) continue;
                if (picture.column < 0) cells[cell] = std::max<double>(cells[cell], from[i]);
                else cells[cell] += from[i];
            }
        }
    }
};

extern "C" void headwise_walk(const Walk *walk) {
    int64_t tasks = walk->B * walk->H * ((walk->T + walk->chunk - 1) / walk->chunk);
    std::atomic<int64_t> next{0};
    auto work = [&] {
        Worker worker(*walk);
        for (int64_t task; (task = next++) < tasks;) worker.run(task);
    };
    std::vector<std::thread> others;
    for (int64_t i = 1; i < std::min(walk->threads, tasks); i++) others.emplace_back(work);
    work();
    for (std::thread &other : others) other.join();
}
