/* What the native engine does between matrix products on a CPU.
 *
 * Keys and values lie in blocks of 64 positions, one set of arrays per layer:
 *
 *     keys    [blocks, kv heads, WIDTH, 64]        a column per position, so that scores of 64 positions come out side by side
 *     values  [blocks, kv heads, 64, PADDED]       PADDED: WIDTH rounded up to 16
 *
 * and row r of `table` lists the blocks of path r. Every token is computed by itself, block after block of its own path, so its
 * bits depend neither on what else is in the batch nor on which blocks are shared.
 */
#include "vectors.h"

#define BLOCK 64
#define TILE 6 /* query heads that share what is loaded of a block */
#define DRAWN 256 /* tokens of a block of the vocabulary */
#define CHUNK 16 /* most tokens whose running sums are kept together, so that a shared block is read from the cache */

/* Products of pairs of bfloat16: two numbers of 32 bits hold two neighbours in the sum each. Two rows are laid into pairs by the unpack
 * instructions, which take 4 from each row in turn; `in_order` undoes that to the sums. */
#if defined(HALF) && defined(__AVX512BF16__) && WIDTH % 64 == 0
#define PAIRED 1
typedef elem factor; /* queries and weights, as the products take them */
#define keep store
typedef struct { __m512i lanes[4]; } Pairs; /* of 64 columns */
static inline Pairs pairs_of(const elem *one, const elem *other) {
    Pairs found;
    for (int c = 0; c < 2; c++) {
        const __m512i a = _mm512_loadu_si512(one + 32 * c), b = other ? _mm512_loadu_si512(other + 32 * c) : _mm512_setzero_si512();
        found.lanes[2 * c] = _mm512_unpacklo_epi16(a, b);
        found.lanes[2 * c + 1] = _mm512_unpackhi_epi16(a, b);
    }
    return found;
}
static inline void in_order(vf *low, vf *high) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    const __m512 a = (__m512)*low, b = (__m512)*high;
    *low = (vf)_mm512_permutex2var_ps(a, first, b);
    *high = (vf)_mm512_permutex2var_ps(a, second, b);
}
#else
typedef float factor;
#define keep store_floats
#endif

typedef struct {
    const int32_t *table; /* [rows, table_width] block numbers */
    int64_t table_width;
    const int32_t *rows;      /* [tokens] row of the table, -1 for padding */
    const int32_t *positions; /* [tokens] tokens before it on its path */
    int64_t tokens, heads, kv_heads, threads;
} Pass;

/* Rotates queries (in place) and keys by the tables cos, sin [tokens, WIDTH] where given, and puts keys and values into their
 * blocks. `stride`: elements from one token to the next; `step`: from one head to the next. */
void tg_store(const Pass *pass, elem *query, int64_t query_stride, int64_t query_step, const elem *key, int64_t key_stride,
              int64_t key_step, const elem *value, int64_t value_stride, int64_t value_step, const float *cosines,
              const float *sines, elem *keys, elem *values) {
    const int64_t half = WIDTH / 2;
#pragma omp parallel for schedule(static) num_threads(pass->threads) if (pass->threads > 1)
    for (int64_t t = 0; t < pass->tokens; t++) {
        if (pass->rows[t] < 0) continue;
        const int64_t place = pass->positions[t] % BLOCK;
        const int64_t block = pass->table[pass->rows[t] * pass->table_width + pass->positions[t] / BLOCK];
        float own[PADDED + LANES], turned[PADDED + LANES];
        elem rounded[PADDED + LANES];
        for (int64_t h = 0; h < (cosines ? pass->heads : 0) + pass->kv_heads; h++) {
            const int64_t kv = cosines ? h - pass->heads : h;
            const elem *from = kv < 0 ? query + t * query_stride + h * query_step : key + t * key_stride + kv * key_step;
            if (cosines) {
                for (int64_t d = 0; d < WIDTH; d += LANES) store_floats(own + d, load_some(from + d, WIDTH - d));
                const float *c = cosines + t * WIDTH, *s = sines + t * WIDTH;
                for (int64_t d = 0; d < half; d++) {
                    turned[d] = own[d] * c[d] - own[d + half] * s[d];
                    turned[d + half] = own[d + half] * c[d + half] + own[d] * s[d + half];
                }
                for (int64_t d = 0; d < WIDTH; d += LANES) store(rounded + d, load_floats(turned + d));
                from = rounded;
            }
            if (kv < 0) {
                memcpy(query + t * query_stride + h * query_step, rounded, WIDTH * sizeof(elem));
            } else {
                elem *column = keys + (block * pass->kv_heads + kv) * WIDTH * BLOCK + place;
                for (int64_t d = 0; d < WIDTH; d++) column[d * BLOCK] = from[d];
                memcpy(values + ((block * pass->kv_heads + kv) * BLOCK + place) * PADDED, value + t * value_stride + kv * value_step,
                       WIDTH * sizeof(elem));
            }
        }
    }
}

/* One block for n <= TILE query heads, by the running softmax
 *     m' = max(m, max s),  z' = e^(m - m') z + sum e^(s - m'),  u' = e^(m - m') u + sum e^(s - m') v */
static inline __attribute__((always_inline)) void one_block(const int n, const elem *restrict keys, const elem *restrict values,
                                                            int first, int last, float scaling, float softcap,
                                                            const factor *restrict queries, float *restrict weighted,
                                                            vf *restrict totals, float *restrict peaks) {
    vf scores[TILE][4];
    factor weights[TILE][BLOCK + 2]; /* the last ones for a pair's missing half */
    float factors[TILE];
    const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int i = 0; i < n; i++)
        for (int c = 0; c < 4; c++) scores[i][c] = all(0.0f);
#ifdef PAIRED
    for (int d = 0; d < WIDTH; d += 2) {
        const Pairs k = pairs_of(keys + d * BLOCK, keys + (d + 1) * BLOCK);
        for (int i = 0; i < n; i++)
            for (int c = 0; c < 4; c++) scores[i][c] = add_pairs(scores[i][c], k.lanes[c], queries + i * PADDED + d);
    }
    for (int i = 0; i < n; i++) {
        in_order(&scores[i][0], &scores[i][1]);
        in_order(&scores[i][2], &scores[i][3]);
    }
#else
    for (int d = 0; d < WIDTH; d++) {
        vf k[4];
        for (int c = 0; c < 4; c++) k[c] = load(keys + d * BLOCK + c * LANES);
        for (int i = 0; i < n; i++)
            for (int c = 0; c < 4; c++) scores[i][c] += queries[i * PADDED + d] * k[c];
    }
#endif
    for (int i = 0; i < n; i++) {
        for (int c = 0; c < 4; c++) scores[i][c] *= scaling;
        if (softcap > 0)
            for (int c = 0; c < 4; c++) scores[i][c] = softcap * (1.0f - 2.0f / (exponential(2.0f / softcap * scores[i][c]) + 1.0f));
        if (first > 0 || last < BLOCK)
            for (int c = 0; c < 4; c++) {
                vi at = lane + c * LANES;
                scores[i][c] = pick((at >= first) & (at < last), scores[i][c], all(-INFINITY));
            }
        float peak = largest(larger(larger(scores[i][0], scores[i][1]), larger(scores[i][2], scores[i][3])));
        if (peak < peaks[i]) peak = peaks[i];
        factors[i] = peak == peaks[i] ? 1.0f : exponential_of(peaks[i] - peak);
        peaks[i] = peak;
        for (int c = 0; c < 4; c++) scores[i][c] = exponential(scores[i][c] - peak);
        totals[i] = totals[i] * factors[i] + ((scores[i][0] + scores[i][1]) + (scores[i][2] + scores[i][3]));
        for (int c = 0; c < 4; c++) keep(weights[i] + c * LANES, scores[i][c]);
        weights[i][BLOCK] = 0;
    }
    for (int start = 0; start < PARTS; start += 4) {
        vf sums[TILE][4];
        for (int i = 0; i < n; i++)
            for (int c = 0; c < 4 && start + c < PARTS; c++)
                sums[i][c] = load_floats(weighted + i * PADDED + (start + c) * LANES) * factors[i];
#ifdef PAIRED
        for (int j = first; j < last; j += 2) {
            const elem *row = values + j * PADDED + start * LANES;
            const Pairs v = pairs_of(row, j + 1 < last ? row + PADDED : NULL);
            for (int i = 0; i < n; i++)
                for (int c = 0; c < 4 && start + c < PARTS; c++) sums[i][c] = add_pairs(sums[i][c], v.lanes[c], weights[i] + j);
        }
#else
        for (int j = first; j < last; j++) {
            vf v[4];
            for (int c = 0; c < 4 && start + c < PARTS; c++) v[c] = load(values + j * PADDED + (start + c) * LANES);
            for (int i = 0; i < n; i++)
                for (int c = 0; c < 4 && start + c < PARTS; c++) sums[i][c] += weights[i][j] * v[c];
        }
#endif
        for (int i = 0; i < n; i++)
            for (int c = 0; c < 4 && start + c < PARTS; c++) store_floats(weighted + i * PADDED + (start + c) * LANES, sums[i][c]);
    }
}

static void block_of_heads(int64_t heads, const elem *keys, const elem *values, int first, int last, float scaling, float softcap,
                           const factor *queries, float *weighted, vf *totals, float *peaks) {
    for (int64_t h = 0; h < heads; h += TILE) {
#define RUN(n) \
    one_block(n, keys, values, first, last, scaling, softcap, queries + h * PADDED, weighted + h * PADDED, totals + h, peaks + h)
        switch (heads - h) {
        case 1: RUN(1); break;
        case 2: RUN(2); break;
        case 3: RUN(3); break;
        case 4: RUN(4); break;
        case 5: RUN(5); break;
        default: RUN(6);
        }
#undef RUN
    }
}

static inline int64_t block_of(const Pass *pass, int64_t token, int64_t number) {
    return pass->rows[token] < 0 ? -1 : pass->table[pass->rows[token] * pass->table_width + number];
}

/* Softmax attention of every token over its own path: out [tokens, heads, WIDTH]. A window of 0 is none, a softcap of 0 likewise,
 * sinks may be null. */
void tg_attend(const Pass *pass, const elem *query, int64_t query_stride, int64_t query_step, const elem *keys,
               const elem *values, elem *out, float scaling, int64_t window, float softcap, const float *sinks) {
    const int64_t group = pass->heads / pass->kv_heads;
    int64_t chunk = CHUNK; /* small enough for every thread to find work, which changes no number */
    while (chunk > 1 && pass->threads > 1 && pass->tokens * pass->kv_heads < 4 * chunk * pass->threads) chunk /= 2;
    const int64_t chunks = (pass->tokens + chunk - 1) / chunk;
#pragma omp parallel for schedule(dynamic) num_threads(pass->threads) if (pass->threads > 1)
    for (int64_t task = 0; task < chunks * pass->kv_heads; task++) {
        const int64_t kv = task % pass->kv_heads, start = task / pass->kv_heads * chunk;
        const int64_t count = pass->tokens - start < chunk ? pass->tokens - start : chunk, size = count * group;
        vf *totals = aligned_alloc(64, size * (sizeof(vf) + (2 * PADDED + LANES) * sizeof(float)));
        float *weighted = (float *)(totals + size), *peaks = weighted + size * PADDED;
        factor *queries = (factor *)(peaks + size * LANES);
        int64_t end = 0;
        for (int64_t i = 0; i < count; i++) {
            const int64_t t = start + i;
            if (pass->rows[t] >= 0 && pass->positions[t] / BLOCK + 1 > end) end = pass->positions[t] / BLOCK + 1;
            for (int64_t g = 0; g < group; g++) {
                const elem *from = query + t * query_stride + (kv * group + g) * query_step;
                factor *to = queries + (i * group + g) * PADDED;
                for (int64_t d = 0; d < PADDED; d += LANES) keep(to + d, load_some(from + d, WIDTH - d));
                totals[i * group + g] = all(0.0f);
                peaks[i * group + g] = -INFINITY;
            }
        }
        memset(weighted, 0, size * PADDED * sizeof(float));
        for (int64_t b = 0; b < end; b++)
            for (int64_t i = 0, together = 1; i < count; i += together, together = 1) {
                const int64_t from = b * BLOCK, block = block_of(pass, start + i, b);
                if (block < 0) continue;
                const int64_t position = pass->positions[start + i];
                const int64_t oldest = window > 0 && position >= window ? position - window + 1 : 0;
                if (from > position || from + BLOCK <= oldest) continue;
                const int first = oldest > from ? oldest - from : 0, last = position - from + 1 < BLOCK ? position - from + 1 : BLOCK;
                if (window == 0 && last == BLOCK) /* tokens side by side that see all of the same block */
                    while (i + together < count && pass->positions[start + i + together] >= from + BLOCK - 1 &&
                           block_of(pass, start + i + together, b) == block)
                        together++;
                const int64_t at = i * group, place = block * pass->kv_heads + kv;
                block_of_heads(together * group, keys + place * WIDTH * BLOCK, values + place * BLOCK * PADDED, first, last, scaling,
                               softcap, queries + at * PADDED, weighted + at * PADDED, totals + at, peaks + at);
            }
        for (int64_t i = 0; i < size; i++) {
            const int64_t t = start + i / group, head = kv * group + i % group;
            float total = sum_of(totals[i]), share = 1.0f;
            if (sinks) {
                const float peak = peaks[i] > sinks[head] ? peaks[i] : sinks[head];
                share = exponential_of(peaks[i] - peak);
                total = total * share + exponential_of(sinks[head] - peak);
            }
            elem *to = out + (t * pass->heads + head) * WIDTH;
            share = pass->rows[t] < 0 ? 0.0f : share / total;
            for (int64_t d = 0; d < WIDTH; d += 2 * LANES) {
                vf low = load_floats(weighted + i * PADDED + d), high = d + LANES < PADDED ? load_floats(weighted + i * PADDED + d + LANES) : low;
#ifdef PAIRED
                in_order(&low, &high);
#endif
                store_some(to + d, low * share, WIDTH - d);
                if (d + LANES < WIDTH) store_some(to + d + LANES, high * share, WIDTH - d - LANES);
            }
        }
        free(totals);
    }
}

/* out = x / sqrt(mean x^2 + eps) * weight by rows of `size`, `per_row` of them `size` apart in each of `rows` rows that are `stride`
 * apart (both in x and in out); where `added` is given it is first added to x [rows, size], in place. */
void tg_norm(elem *x, const elem *added, const elem *weight, elem *out, int64_t rows, int64_t per_row, int64_t stride, int64_t size,
             float eps, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t r = 0; r < rows * per_row; r++) {
        const int64_t at = r / per_row * stride + r % per_row * size;
        vf squares = all(0.0f);
        for (int64_t d = 0; d < size; d += LANES) {
            vf part = load_some(x + at + d, size - d);
            if (added) {
                store_some(x + at + d, part + load_some(added + at + d, size - d), size - d);
                part = load_some(x + at + d, size - d);
            }
            squares += part * part;
        }
        const float factor = 1.0f / sqrtf(sum_of(squares) / size + eps);
        for (int64_t d = 0; d < size; d += LANES)
            store_some(out + at + d, load_some(x + at + d, size - d) * factor * load_some(weight + d, size - d), size - d);
    }
}

/* out [rows, size] = silu(gate) * up, with gate and up `stride` apart from row to row. */
void tg_gate(const elem *gate, const elem *up, elem *out, int64_t rows, int64_t stride, int64_t size, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t r = 0; r < rows; r++)
        for (int64_t d = 0; d < size; d += LANES) {
            const vf x = load_some(gate + r * stride + d, size - d);
            store_some(out + r * size + d, x / (1.0f + exponential(-x)) * load_some(up + r * stride + d, size - d), size - d);
        }
}

/* For each row of logits l / T, with s = l / T - max, by blocks of DRAWN tokens: peaks [rows] the largest logit l,
 * sums [rows, blocks] sum e^s, moments [rows] sum s e^s. */
void tg_blocks(const elem *logits, int64_t rows, int64_t size, const float *temperatures, float *peaks, float *sums, float *moments,
               int64_t threads) {
    const int64_t blocks = (size + DRAWN - 1) / DRAWN;
    const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t r = 0; r < rows; r++) {
        const elem *row = logits + r * size;
        const float factor = 1.0f / temperatures[r];
        vf peak = all(-INFINITY), moment = all(0.0f);
        for (int64_t d = 0; d < size; d += LANES)
            peak = larger(peak, pick(lane < (int32_t)(size - d), load_some(row + d, size - d), all(-INFINITY)));
        peaks[r] = largest(peak);
        for (int64_t b = 0; b < blocks; b++) {
            vf sum = all(0.0f);
            for (int64_t d = b * DRAWN; d < (b + 1) * DRAWN && d < size; d += LANES) {
                vi inside = lane < (int32_t)(size - d);
                vf shifted = pick(inside, (load_some(row + d, size - d) - peaks[r]) * factor, all(0.0f));
                vf weight = pick(inside, exponential(shifted), all(0.0f));
                sum += weight;
                moment += weight * shifted;
            }
            sums[r * blocks + b] = sum_of(sum);
        }
        moments[r] = sum_of(moment);
    }
}

/* log x for normal x > 0, within 2 units of the last place of a double: x = 2^e m with m about 1, log m = 2 artanh((m - 1) / (m + 1)). */
static inline double logarithm(double x) {
    int64_t bits;
    memcpy(&bits, &x, sizeof bits);
    const int64_t power = (bits - 0x3fe6a09e667f3bcd) >> 52; /* m from sqrt(1/2) to sqrt(2) */
    bits -= power * ((int64_t)1 << 52);
    double m;
    memcpy(&m, &bits, sizeof m);
    const double s = (m - 1.0) / (m + 1.0), z = s * s;
    double sum = 1.0 / 19;
    for (int k = 17; k > 0; k -= 2) sum = sum * z + 1.0 / k;
    return power * 0.69314718055994530942 + 2.0 * s * sum;
}

/* out [rows, size] = -log(-log u) of Philox-4x32-10's words: entry v of a row is word v % 4 of the counter (v / 4, position, 0, 0), and
 * u = (word + 1/2) / 2^32. `draws` [rows, 3]: both words of the key, and the position, -1 for a row of zeros. */
void tg_gumbels(const int64_t *draws, float *out, int64_t rows, int64_t size, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows * size > 8192)
    for (int64_t r = 0; r < rows; r++)
        for (int64_t start = 0; start < size; start += 4 * LANES) {
            uint32_t words[4][LANES];
            float noise[LANES][4];
            for (int i = 0; i < LANES; i++) {
                words[0][i] = start / 4 + i;
                words[1][i] = draws[3 * r + 2];
                words[2][i] = words[3][i] = 0;
            }
            uint32_t low = draws[3 * r], high = draws[3 * r + 1];
            for (int number = 0; number < 10; number++) {
                for (int i = 0; i < LANES; i++) {
                    const uint64_t first = (uint64_t)words[0][i] * 0xD2511F53, third = (uint64_t)words[2][i] * 0xCD9E8D57;
                    words[0][i] = (uint32_t)(third >> 32) ^ words[1][i] ^ low;
                    words[2][i] = (uint32_t)(first >> 32) ^ words[3][i] ^ high;
                    words[1][i] = (uint32_t)third;
                    words[3][i] = (uint32_t)first;
                }
                low += 0x9E3779B9;
                high += 0xBB67AE85;
            }
            for (int w = 0; w < 4; w++)
                for (int i = 0; i < LANES; i++) noise[i][w] = -logarithm(-logarithm((words[w][i] + 0.5) * 0x1p-32));
            if (draws[3 * r + 2] < 0) memset(noise, 0, sizeof noise);
            memcpy(out + r * size + start, noise, (size - start < 4 * LANES ? size - start : 4 * LANES) * sizeof(float));
        }
}

/* Products of rows with weights that lie in panels of 16 outputs: [panels, inputs / STEP, 16, STEP]. Every sum runs over the inputs in
 * order, so a row's bits do not depend on the rows beside it. */
#ifdef STEP
#define MOST_ROWS 8 /* whose sums stay in registers */
#define AHEAD 16384 /* bytes of weights that are asked for before they are needed */

int64_t tg_product_step(void) { return STEP; }

typedef uint32_t word __attribute__((may_alias)); /* STEP elements */

void tg_lay_out(const elem *weight, elem *to, int64_t inputs, int64_t outputs, int64_t threads) {
    const int64_t words = inputs / STEP;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t panel = 0; panel < (outputs + LANES - 1) / LANES; panel++)
        for (int64_t p = 0; p < words; p++)
            for (int64_t output = panel * LANES; output < (panel + 1) * LANES; output++)
                ((word *)to)[(panel * words + p) * LANES + output % LANES] = output < outputs ? ((const word *)weight)[output * words + p] : 0;
}

static inline __attribute__((always_inline)) void one_panel(const int rows, const elem *restrict x, int64_t stride,
                                                            const elem *restrict weights, vf bias, elem *restrict out, int64_t inputs,
                                                            int64_t outputs, int64_t left) {
    vf sums[MOST_ROWS];
    for (int i = 0; i < rows; i++) sums[i] = all(0.0f);
    for (int64_t p = 0; p < inputs; p += STEP) {
        const __m512i weight = _mm512_loadu_si512(weights + p * LANES);
        _mm_prefetch((const char *)(weights + p * LANES) + AHEAD, _MM_HINT_T1);
        for (int i = 0; i < rows; i++) sums[i] = add_products(sums[i], weight, x + i * stride + p);
    }
    for (int i = 0; i < rows; i++) store_some(out + i * outputs, sums[i] + bias, left);
}

/* out [rows, outputs] = x weight^T + bias, for rows of x `stride` apart; bias may be null. */
void tg_product(const elem *x, int64_t stride, const elem *weights, const elem *bias, elem *out, int64_t rows, int64_t inputs,
                int64_t outputs, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t panel = 0; panel < (outputs + LANES - 1) / LANES; panel++) {
        const int64_t first = panel * LANES, left = outputs - first;
        const vf added = bias ? load_some(bias + first, left) : all(0.0f);
        for (int64_t r = 0; r < rows; r += MOST_ROWS) {
#define RUN(n) one_panel(n, x + r * stride, stride, weights + first * inputs, added, out + r * outputs + first, inputs, outputs, left)
            switch (rows - r) {
            case 1: RUN(1); break;
            case 2: RUN(2); break;
            case 3: RUN(3); break;
            case 4: RUN(4); break;
            case 5: RUN(5); break;
            case 6: RUN(6); break;
            case 7: RUN(7); break;
            default: RUN(8);
            }
#undef RUN
        }
    }
}
#else
int64_t tg_product_step(void) { return 0; }
void tg_lay_out(const elem *weight, elem *to, int64_t inputs, int64_t outputs, int64_t threads) {}
void tg_product(const elem *x, int64_t stride, const elem *weights, const elem *bias, elem *out, int64_t rows, int64_t inputs,
                int64_t outputs, int64_t threads) {}
#endif
