/* Attention over packed trees for the learner, forward and backward, on a CPU.
 *
 * Rows (queries) are cut into tiles of 64 from the first token on, columns (keys) into runs of at most 64 tokens of one node. Scores
 * are formed column by row, so that a vector holds 16 rows: their running softmax needs no sums across a vector, and what a row does
 * not see is masked away. All products are of one kind, `multiply` below: its first factor is read number by number (or pair by pair),
 * its second vector by vector, which is why most operands are copied into that order once.
 */
#include "vectors.h"

#define TILE 64
#define MOST_RUN 64
#define TILE_PARTS (TILE / LANES)

typedef struct {
    int64_t start, count, end; /* tokens start .. start + count - 1, each seen by itself and all after it that lie before `end` */
    int64_t share;             /* of the backward pass that it belongs to */
} Run;

typedef struct {
    const Run *runs; /* ascending */
    int64_t num_runs, tokens, heads, kv_heads, shares, threads;
    float scaling;
} Plan;

typedef struct {
    const elem *first;
    int64_t stride, step; /* from one token to the next, from one head to the next */
} Rows;

int64_t tg_tree_step(void) {
#ifdef STEP
    return STEP;
#else
    return 0;
#endif
}

#ifdef STEP
static inline const elem *at(Rows rows, int64_t token, int64_t head) { return rows.first + token * rows.stride + head * rows.step; }
static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t num_tiles(const Plan *plan) { return (plan->tokens + TILE - 1) / TILE; }

/* n rows of  sums [rows, lanes] += factors [rows, count] vectors [count / STEP, lanes, STEP]  (`is_fresh`: = instead of +=) */
static inline __attribute__((always_inline)) void some_rows(const int n, const int parts, const elem *restrict factors, int64_t stride,
                                                            const elem *restrict vectors, int64_t lanes, int64_t count,
                                                            float *restrict sums, int64_t sums_stride, int is_fresh) {
    vf found[6][4];
    for (int i = 0; i < n; i++)
        for (int c = 0; c < parts; c++) found[i][c] = is_fresh ? all(0.0f) : load_floats(sums + i * sums_stride + c * LANES);
    for (int64_t k = 0; k < count; k += STEP) {
        __m512i own[4];
        for (int c = 0; c < parts; c++) own[c] = _mm512_loadu_si512(vectors + k * lanes + c * LANES * STEP);
        for (int i = 0; i < n; i++)
            for (int c = 0; c < parts; c++) found[i][c] = add_products(found[i][c], own[c], factors + i * stride + k);
    }
    for (int i = 0; i < n; i++)
        for (int c = 0; c < parts; c++) store_floats(sums + i * sums_stride + c * LANES, found[i][c]);
}

#define ROWS_OF(n, parts) \
    some_rows(n, parts, factors + m * stride, stride, vectors, lanes, count, sums + m * sums_stride, sums_stride, is_fresh)
#define BY_PARTS(parts) \
    for (int64_t m = 0; m < rows; m += 6) switch (rows - m) { \
        case 1: ROWS_OF(1, parts); break; \
        case 2: ROWS_OF(2, parts); break; \
        case 3: ROWS_OF(3, parts); break; \
        case 4: ROWS_OF(4, parts); break; \
        case 5: ROWS_OF(5, parts); break; \
        default: ROWS_OF(6, parts); \
        }

static void multiply(int64_t rows, int64_t parts, const elem *factors, int64_t stride, const elem *vectors, int64_t lanes,
                     int64_t count, float *sums, int64_t sums_stride, int is_fresh) {
    for (; parts >= 4; parts -= 4, vectors += 4 * LANES * STEP, sums += 4 * LANES) BY_PARTS(4)
    if (parts & 2) {
        BY_PARTS(2)
        vectors += 2 * LANES * STEP, sums += 2 * LANES;
    }
    if (parts & 1) BY_PARTS(1)
}

/* The rows of a tile that see anything of a run, in vectors. */
typedef struct {
    int64_t first, parts; /* vectors */
    int is_whole;         /* every row sees all of the run */
} Seen;

static inline Seen seen_of(const Run *run, int64_t tile) {
    const int64_t from = tile * TILE, low = most(run->start - from, 0), high = least(run->end - from, TILE);
    if (low >= high) return (Seen){0, 0, 0};
    return (Seen){low / LANES, (high + LANES - 1) / LANES - low / LANES, from >= run->start + run->count - 1 && high == TILE};
}

/* Which of 16 rows from `row` on see `column` of a run. */
static inline vi sees(const Run *run, int64_t column, int64_t row) {
    const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return (lane >= (int32_t)(column - row)) & (lane < (int32_t)(run->end - row));
}

/* Puts 16 rows of STEP neighbouring columns into [count / STEP, TILE, STEP]. */
static inline void put(elem *to, int64_t column, int64_t part, vf one, vf other) {
#if STEP == 2
    const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)one));
    const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)other));
    _mm512_storeu_si512(to + column * TILE + part * LANES * STEP, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
#else
    store(to + column * TILE + part * LANES, one);
#endif
}

typedef uint32_t word __attribute__((may_alias, aligned(2)));

/* A tile of one head as vectors of rows: [WIDTH / STEP, TILE, STEP]; rows beyond the last token are 0. */
static void by_width(Rows rows, int64_t tile, int64_t head, int64_t tokens, elem *to) {
    const int64_t from = tile * TILE, count = least(tokens - from, TILE);
    for (int64_t i = 0; i < count; i++) {
        const word *own = (const word *)at(rows, from + i, head);
        for (int64_t p = 0; p < WIDTH / STEP; p++) ((word *)to)[p * TILE + i] = own[p];
    }
    for (int64_t p = 0; count < TILE && p < WIDTH / STEP; p++)
        memset(to + (p * TILE + count) * STEP, 0, (TILE - count) * STEP * sizeof(elem));
}

/* The same as vectors of the width: [TILE / STEP, PADDED, STEP]. */
static void by_rows(Rows rows, int64_t tile, int64_t head, int64_t tokens, elem *to) {
    const int64_t from = tile * TILE, count = least(tokens - from, TILE);
    memset(to, 0, TILE * PADDED * sizeof(elem));
    for (int64_t i = 0; i < count; i++) {
        const elem *own = at(rows, from + i, head);
        elem *place = to + i / STEP * STEP * PADDED + i % STEP;
        for (int64_t d = 0; d < WIDTH; d++) place[d * STEP] = own[d];
    }
}

/* Every run of a head turned round, [WIDTH, count] at start * WIDTH of `to` [tokens * WIDTH + 1]. The last pair of a row of odd length
 * reaches into what follows; its weight is 0, so it must only be finite. */
static void turn(const Plan *plan, Rows rows, int64_t head, elem *to) {
    to[plan->tokens * WIDTH] = 0;
#pragma omp parallel for schedule(static) num_threads(plan->threads) if (plan->threads > 1)
    for (int64_t r = 0; r < plan->num_runs; r++) {
        const Run *run = plan->runs + r;
        for (int64_t j = 0; j < run->count; j++) {
            const elem *own = at(rows, run->start + j, head);
            for (int64_t d = 0; d < WIDTH; d++) to[run->start * WIDTH + d * run->count + j] = own[d];
        }
    }
}

static void *room(int64_t bytes) { return aligned_alloc(64, (bytes + 127) / 64 * 64); }

/* out [tokens, heads, WIDTH] and lse [heads, tokens], log sum e^score of what each row sees. Returns 0, 1 without memory. */
int64_t tg_tree_forward(const Plan *plan, Rows query, Rows key, Rows value, elem *out, float *lse) {
    const int64_t group = plan->heads / plan->kv_heads, tiles = num_tiles(plan), all_of_head = plan->tokens * WIDTH;
    elem *turned = room(plan->kv_heads * all_of_head * sizeof(elem));
    if (!turned) return 1;
    for (int64_t kv = 0; kv < plan->kv_heads; kv++) turn(plan, value, kv, turned + kv * all_of_head);
#pragma omp parallel for schedule(dynamic) num_threads(plan->threads) if (plan->threads > 1)
    for (int64_t task = 0; task < tiles * plan->heads; task++) {
        const int64_t tile = task / plan->heads, head = task % plan->heads, kv = head / group;
        const int64_t from = tile * TILE, count = least(plan->tokens - from, TILE);
        elem wide[TILE * WIDTH] __attribute__((aligned(64))), weights[MOST_RUN * TILE] __attribute__((aligned(64)));
        float scores[MOST_RUN * TILE] __attribute__((aligned(64))), sums[PADDED * TILE] __attribute__((aligned(64)));
        float rows[TILE * PADDED] __attribute__((aligned(64)));
        vf peaks[TILE_PARTS], totals[TILE_PARTS];
        for (int c = 0; c < TILE_PARTS; c++) peaks[c] = all(-INFINITY), totals[c] = all(0.0f);
        memset(sums, 0, sizeof sums);
        by_width(query, tile, head, plan->tokens, wide);
        for (const Run *run = plan->runs; run < plan->runs + plan->num_runs && run->start < from + count; run++) {
            const Seen seen = seen_of(run, tile);
            if (!seen.parts) continue;
            const int64_t columns = least(run->count, from + count - run->start), lane = seen.first * LANES;
            multiply(columns, seen.parts, at(key, run->start, kv), key.stride, wide + lane * STEP, TILE, WIDTH, scores + lane, TILE, 1);
            for (int64_t c = seen.first; c < seen.first + seen.parts; c++) {
                vf peak = peaks[c];
                for (int64_t j = 0; j < columns; j++) {
                    vf score = load_floats(scores + j * TILE + c * LANES) * plan->scaling;
                    if (!seen.is_whole) score = pick(sees(run, run->start + j, from + c * LANES), score, all(-INFINITY));
                    store_floats(scores + j * TILE + c * LANES, score);
                    peak = larger(peak, score);
                }
                const vf base = pick(peak > -INFINITY, peak, all(0.0f)), factor = exponential(peaks[c] - base);
                vf total = totals[c] * factor;
                for (int64_t j = 0; j < columns; j += STEP) {
                    const vf one = exponential(load_floats(scores + j * TILE + c * LANES) - base);
                    vf other = all(0.0f);
                    if (STEP == 2 && j + 1 < columns) other = exponential(load_floats(scores + (j + 1) * TILE + c * LANES) - base);
                    total += one + other;
                    put(weights, j, c, one, other);
                }
                if (_mm512_cmp_ps_mask((__m512)factor, _mm512_set1_ps(1.0f), _CMP_NEQ_UQ))
                    for (int64_t d = 0; d < WIDTH; d++)
                        store_floats(sums + d * TILE + c * LANES, load_floats(sums + d * TILE + c * LANES) * factor);
                peaks[c] = peak, totals[c] = total;
            }
            multiply(WIDTH, seen.parts, turned + kv * all_of_head + run->start * WIDTH, run->count, weights + lane * STEP, TILE, columns,
                     sums + lane, TILE, 0);
        }
        for (int64_t i = 0; i < count; i++) {
            const float peak = peaks[i / LANES][i % LANES], total = totals[i / LANES][i % LANES];
            for (int64_t d = 0; d < WIDTH; d++) rows[i * PADDED + d] = sums[d * TILE + i] / total;
            elem *to = out + ((from + i) * plan->heads + head) * WIDTH;
            for (int64_t d = 0; d < WIDTH; d += LANES) store_some(to + d, load_floats(rows + i * PADDED + d), WIDTH - d);
            lse[head * plan->tokens + from + i] = peak + logf(total);
        }
    }
    free(turned);
    return 0;
}

/* What the backward pass knows of the query heads of one kv head: [group, tiles, ...] each. */
typedef struct {
    elem *query_width, *query_rows, *grad_width, *grad_rows; /* see `by_width`, `by_rows` */
    float *lse, *inner;                                      /* [TILE]; inner: grad . out of each row */
    float *query_grads;                                      /* [shares, group, tiles, WIDTH, TILE] */
} Group;

static void prepare(const Plan *plan, Group to, Rows query, Rows grad, const elem *out, const float *lse, int64_t kv) {
    const int64_t group = plan->heads / plan->kv_heads, tiles = num_tiles(plan);
#pragma omp parallel for schedule(static) num_threads(plan->threads) if (plan->threads > 1)
    for (int64_t place = 0; place < group * tiles; place++) {
        const int64_t head = kv * group + place / tiles, tile = place % tiles, from = tile * TILE;
        by_width(query, tile, head, plan->tokens, to.query_width + place * TILE * WIDTH);
        by_width(grad, tile, head, plan->tokens, to.grad_width + place * TILE * WIDTH);
        by_rows(query, tile, head, plan->tokens, to.query_rows + place * TILE * PADDED);
        by_rows(grad, tile, head, plan->tokens, to.grad_rows + place * TILE * PADDED);
        for (int64_t i = 0; i < TILE; i++) {
            const int has_row = from + i < plan->tokens;
            vf inner = all(0.0f);
            for (int64_t d = 0; has_row && d < WIDTH; d += LANES)
                inner += load_some(at(grad, from + i, head) + d, WIDTH - d) *
                         load_some(out + ((from + i) * plan->heads + head) * WIDTH + d, WIDTH - d);
            to.inner[place * TILE + i] = sum_of(inner);
            to.lse[place * TILE + i] = has_row ? lse[head * plan->tokens + from + i] : 0.0f;
        }
    }
}

/* The gradients that one run gets and gives, for all rows that see it:
 *     p = e^(s - lse),  dv += p do,  ds = p (do . v - do . o) scaling,  dk += ds q,  dq += ds k */
static void one_run(const Plan *plan, const Run *run, Group own, Rows key, Rows value, int64_t kv, const elem *turned_keys,
                    float *query_grads, elem *key_grad, elem *value_grad) {
    const int64_t group = plan->heads / plan->kv_heads, tiles = num_tiles(plan);
    elem weights[MOST_RUN * TILE] __attribute__((aligned(64))), slopes[MOST_RUN * TILE] __attribute__((aligned(64)));
    elem paired[MOST_RUN * TILE] __attribute__((aligned(64)));
    float scores[MOST_RUN * TILE] __attribute__((aligned(64))), inner[MOST_RUN * TILE] __attribute__((aligned(64)));
    float keys[MOST_RUN * PADDED] __attribute__((aligned(64))), values[MOST_RUN * PADDED] __attribute__((aligned(64)));
    memset(keys, 0, sizeof keys);
    memset(values, 0, sizeof values);
    for (int64_t tile = run->start / TILE; tile * TILE < run->end; tile++)
        for (int64_t g = 0; g < group; g++) {
            const Seen seen = seen_of(run, tile);
            const int64_t place = g * tiles + tile, lane = seen.first * LANES, from = tile * TILE;
            const int64_t columns = least(run->count, from + TILE - run->start), rows = seen.parts * LANES;
            multiply(columns, seen.parts, at(key, run->start, kv), key.stride, own.query_width + place * TILE * WIDTH + lane * STEP, TILE,
                     WIDTH, scores + lane, TILE, 1);
            multiply(columns, seen.parts, at(value, run->start, kv), value.stride, own.grad_width + place * TILE * WIDTH + lane * STEP,
                     TILE, WIDTH, inner + lane, TILE, 1);
            for (int64_t c = seen.first; c < seen.first + seen.parts; c++) {
                const vf total = load_floats(own.lse + place * TILE + c * LANES), base = load_floats(own.inner + place * TILE + c * LANES);
                for (int64_t j = 0; j < columns; j += STEP) {
                    vf slope[2] = {all(0.0f), all(0.0f)};
                    for (int64_t s = 0; s < STEP && j + s < columns; s++) {
                        const int64_t here = (j + s) * TILE + c * LANES;
                        vf weight = exponential(load_floats(scores + here) * plan->scaling - total);
                        if (!seen.is_whole) weight = pick(sees(run, run->start + j + s, from + c * LANES), weight, all(0.0f));
                        slope[s] = weight * (load_floats(inner + here) - base) * plan->scaling;
                        store(weights + here, weight);
                        store(slopes + here, slope[s]);
                    }
                    put(paired, j, c, slope[0], slope[1]);
                }
            }
            multiply(columns, PARTS, weights + lane, TILE, own.grad_rows + place * TILE * PADDED + lane * PADDED, PADDED, rows, values,
                     PADDED, 0);
            multiply(columns, PARTS, slopes + lane, TILE, own.query_rows + place * TILE * PADDED + lane * PADDED, PADDED, rows, keys,
                     PADDED, 0);
            multiply(WIDTH, seen.parts, turned_keys + run->start * WIDTH, run->count, paired + lane * STEP, TILE, columns,
                     query_grads + place * TILE * WIDTH + lane, TILE, 0);
        }
    for (int64_t j = 0; j < run->count; j++) {
        const int64_t to = ((run->start + j) * plan->kv_heads + kv) * WIDTH;
        for (int64_t d = 0; d < WIDTH; d += LANES) {
            store_some(key_grad + to + d, load_floats(keys + j * PADDED + d), WIDTH - d);
            store_some(value_grad + to + d, load_floats(values + j * PADDED + d), WIDTH - d);
        }
    }
}

static void write_query_grads(const Plan *plan, Group own, int64_t kv, elem *query_grad) {
    const int64_t group = plan->heads / plan->kv_heads, tiles = num_tiles(plan), size = TILE * WIDTH;
#pragma omp parallel for schedule(static) num_threads(plan->threads) if (plan->threads > 1)
    for (int64_t place = 0; place < group * tiles; place++) {
        const int64_t head = kv * group + place / tiles, from = place % tiles * TILE;
        float rows[TILE * PADDED] __attribute__((aligned(64)));
        float *first = own.query_grads + place * size;
        for (int64_t s = 1; s < plan->shares; s++) {
            const float *other = first + s * group * tiles * size;
            for (int64_t x = 0; x < size; x += LANES) store_floats(first + x, load_floats(first + x) + load_floats(other + x));
        }
        for (int64_t d = 0; d < WIDTH; d++)
            for (int64_t i = 0; i < TILE; i++) rows[i * PADDED + d] = first[d * TILE + i];
        for (int64_t i = 0; i < TILE && from + i < plan->tokens; i++) {
            elem *to = query_grad + ((from + i) * plan->heads + head) * WIDTH;
            for (int64_t d = 0; d < WIDTH; d += LANES) store_some(to + d, load_floats(rows + i * PADDED + d), WIDTH - d);
        }
    }
}

/* Gradients of query [tokens, heads, WIDTH], key and value [tokens, kv heads, WIDTH], given that of out. One kv head after the other;
 * the runs are dealt out to `shares`, each with sums of its own for the queries. Returns 0, 1 without memory. */
int64_t tg_tree_backward(const Plan *plan, Rows query, Rows key, Rows value, const elem *out, const float *lse, Rows grad,
                         elem *query_grad, elem *key_grad, elem *value_grad) {
    const int64_t group = plan->heads / plan->kv_heads, places = group * num_tiles(plan);
    const int64_t width = places * TILE * WIDTH, padded = places * TILE * PADDED;
    float *floats = room((2 * places * TILE + plan->shares * width) * sizeof(float));
    elem *elems = room((2 * width + 2 * padded + plan->tokens * WIDTH + LANES) * sizeof(elem));
    if (floats && elems) {
        elem *turned_keys = elems + 2 * width + 2 * padded;
        const Group own = {elems,  elems + 2 * width, elems + width, elems + 2 * width + padded,
                           floats, floats + places * TILE, floats + 2 * places * TILE};
        for (int64_t kv = 0; kv < plan->kv_heads; kv++) {
            prepare(plan, own, query, grad, out, lse, kv);
            turn(plan, key, kv, turned_keys);
#pragma omp parallel for schedule(static, 1) num_threads(plan->threads) if (plan->threads > 1)
            for (int64_t share = 0; share < plan->shares; share++) {
                float *grads = own.query_grads + share * width;
                memset(grads, 0, width * sizeof(float));
                for (const Run *run = plan->runs; run < plan->runs + plan->num_runs; run++)
                    if (run->share == share) one_run(plan, run, own, key, value, kv, turned_keys, grads, key_grad, value_grad);
            }
            write_query_grads(plan, own, kv, query_grad);
        }
    }
    const int64_t has_failed = !floats || !elems;
    free(floats);
    free(elems);
    return has_failed;
}
#else
int64_t tg_tree_forward(const Plan *plan, Rows query, Rows key, Rows value, elem *out, float *lse) { return 1; }
int64_t tg_tree_backward(const Plan *plan, Rows query, Rows key, Rows value, const elem *out, const float *lse, Rows grad,
                         elem *query_grad, elem *key_grad, elem *value_grad) {
    return 1;
}
#endif
