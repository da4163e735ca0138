// Causal attention of queries over keys that lie in spans, and its gradient.
//
// A task is a run of queries, one after the other in memory, that see the same spans of keys: the
// first query sees all keys before its place and the one there, the next one more, and so on.
// What comes out for a query depends on its own keys alone, to the last bit: not on the task it is
// in, nor on how the spans are cut. So a token is trained with the bits it was sampled with.
#include <cstdlib>
#include <new>
#include <vector>

#include "kernels.h"

static long whole(long count) { return (count + LANES - 1) / LANES * LANES; }

// Memory of one thread.
struct Scratch {
    float* at;
    explicit Scratch(long size) : at((float*)aligned_alloc(64, whole(size) * sizeof(float))) {
        if (!at) throw std::bad_alloc();
    }
    ~Scratch() { free(at); }
    Scratch(const Scratch&) = delete;
};

// Sums of neighbouring groups of 1, 2, 4 or 8 lanes, those of `a` and `b` in turns.
static inline Floats fold1(Floats a, Floats b) {
    return __builtin_shufflevector(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
           __builtin_shufflevector(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
}

static inline Floats fold2(Floats a, Floats b) {
    return __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}

static inline Floats fold4(Floats a, Floats b) {
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
           __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
}

static inline Floats fold8(Floats a, Floats b) {
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}

// Products of a row with sixteen others of W vectors each.
template <int W>
static inline Floats products(const Floats (&row)[W], const float* others) {
    Floats sums[LANES];
    for (int i = 0; i < LANES; i++) {
        sums[i] = row[0] * load(others + i * W * LANES);
        for (int w = 1; w < W; w++) sums[i] += row[w] * load(others + (i * W + w) * LANES);
    }
    for (int i = 0; i < 8; i++) sums[i] = fold1(sums[2 * i], sums[2 * i + 1]);
    for (int i = 0; i < 4; i++) sums[i] = fold2(sums[2 * i], sums[2 * i + 1]);
    for (int i = 0; i < 2; i++) sums[i] = fold4(sums[2 * i], sums[2 * i + 1]);
    return fold8(sums[0], sums[1]);
}

// [rows, count] products of rows with the first `count` (whole vectors) of others.
template <int W>
static void multiply(const float* rows, long num_rows, const float* others, long count, float* out,
                     long stride) {
    for (long first = 0; first < count; first += LANES)
        for (long r = 0; r < num_rows; r++) {
            Floats row[W];
            for (int w = 0; w < W; w++) row[w] = load(rows + (r * W + w) * LANES);
            store(out + r * stride + first, products<W>(row, others + first * W * LANES));
        }
}

// out[r] = sum over j of weights[r, j] others[j], for R rows at a time.
template <int W, int R>
static inline void combine(const float* weights, long stride, const float* others, long count,
                           Floats (&out)[R][W]) {
    for (int r = 0; r < R; r++)
        for (int w = 0; w < W; w++) out[r][w] = Floats{};
    for (long j = 0; j < count; j++)
        for (int w = 0; w < W; w++) {
            Floats other = load(others + (j * W + w) * LANES);
            for (int r = 0; r < R; r++) out[r][w] += weights[r * stride + j] * other;
        }
}

static long first_span(const Tasks& tasks, long task) {
    return task ? tasks.spans_end[task - 1] : 0;
}

static long num_keys(const Tasks& tasks, long task) {
    return tasks.first_place[task] + tasks.num_queries[task];
}

// Calls `use` with the place of each key from `first` up to `end`, and where it lies in memory
// under a key head.
template <class Use>
static void each_key(const Tasks& tasks, const Shape& shape, long task, long head, long first,
                     long end, Use use) {
    long begin = 0;  // place of the span's first key
    for (long span = first_span(tasks, task); span < tasks.spans_end[task] && begin < end; span++) {
        long at = tasks.span_first[span] * shape.span_stride + head * shape.head_stride;
        if (tasks.span_skip) at += tasks.span_skip[span] * shape.key_stride;
        long stop = begin + tasks.span_length[span];
        for (long place = first > begin ? first : begin; place < stop && place < end; place++)
            use(place, at + (place - begin) * shape.key_stride);
        begin = stop;
    }
}

// The task's keys (or values) of a head from place `first` on, as floats, then zeros to a whole
// vector.
template <class T, int W>
static void collect(const T* from, const Tasks& tasks, const Shape& shape, long task, long head,
                    long first, float* to) {
    long count = num_keys(tasks, task);
    each_key(tasks, shape, task, head, first, count, [=](long place, long at) {
        for (int w = 0; w < W; w++)
            store(to + (place * W + w) * LANES, load(from + at + w * LANES));
    });
    memset(to + count * W * LANES, 0, (whole(count) - count) * W * LANES * sizeof(float));
}

// Scores of keys that the query at `place` does not see become -inf.
static void hide(float* scores, long place, long window, long count) {
    for (long j = 0; j <= place - window; j++) scores[j] = -INFINITY;
    for (long j = place + 1; j < count; j++) scores[j] = -INFINITY;
}

// Rows of a task under one key head: all queries of all its heads, those of a query together.
struct Rows {
    long per_query, first_head, num_heads;
    Rows(const Shape& shape, long head)
        : per_query(shape.num_heads / shape.kv_heads),
          first_head(head * per_query),
          num_heads(shape.num_heads) {}
    long place(const Tasks& tasks, long task, long row) const {
        return tasks.first_place[task] + row / per_query;
    }
    long index(const Tasks& tasks, long task, long row) const {  // of the row among all heads
        return (tasks.first_query[task] + row / per_query) * num_heads + first_head + row % per_query;
    }
};

static long most_keys(const Tasks& tasks, long num_tasks) {
    long most = 0;
    for (long t = 0; t < num_tasks; t++) {
        long keys = num_keys(tasks, t);
        most = keys > most ? keys : most;
    }
    return whole(most);
}

// Asks for the task's keys and values from place `first` on, some time before they are needed.
template <class T, int W>
static void fetch(const T* key, const T* value, const Tasks& tasks, const Shape& shape, long task,
                  long head, long first) {
    constexpr long LINE = 64 / sizeof(T);
    each_key(tasks, shape, task, head, first, num_keys(tasks, task), [=](long, long at) {
        for (long i = 0; i < W * LANES; i += LINE) {
            __builtin_prefetch(key + at + i);
            __builtin_prefetch(value + at + i);
        }
    });
}

// Tasks of few queries, one after the other, whose first keys lie in the same spans: samples of one
// prompt. What they share is collected once.
struct Bundle {
    long first, end;  // tasks
    long shared;      // keys
};

static long num_shared(const Tasks& tasks, long one, long other) {
    long a = first_span(tasks, one), b = first_span(tasks, other), keys = 0;
    for (; a < tasks.spans_end[one] && b < tasks.spans_end[other]; a++, b++) {
        bool is_same = tasks.span_first[a] == tasks.span_first[b] &&
                       tasks.span_length[a] == tasks.span_length[b] &&
                       (!tasks.span_skip || tasks.span_skip[a] == tasks.span_skip[b]);
        if (!is_same) break;
        keys += tasks.span_length[a];
    }
    return keys;
}

static std::vector<Bundle> bundles(const Tasks& tasks, const Shape& shape) {
    constexpr long ROWS = 32;
    std::vector<Bundle> found;
    long rows = 0;
    for (long task = 0; task < shape.num_tasks; task++) {
        long own = tasks.num_queries[task] * (shape.num_heads / shape.kv_heads);
        long keys = num_keys(tasks, task), shared = 0;
        if (task && rows + own <= ROWS) shared = num_shared(tasks, found.back().first, task);
        if (shared) {
            Bundle& last = found.back();
            for (long most : {shared, keys}) last.shared = most < last.shared ? most : last.shared;
            last.end = task + 1;
            rows += own;
        } else {
            found.push_back({task, task + 1, keys});
            rows = own;
        }
    }
    return found;
}

// Puts keys (or values) of the tasks' own tokens where they belong.
template <class T, int W>
static void put(const T* fresh, T* to, const Tasks& tasks, const Shape& shape, long task) {
    constexpr long D = W * LANES;
    long first = tasks.first_place[task];
    for (long head = 0; head < shape.kv_heads; head++) {
        const T* from = fresh + (tasks.first_query[task] * shape.kv_heads + head) * D;
        each_key(tasks, shape, task, head, first, num_keys(tasks, task), [=](long place, long at) {
            memcpy(to + at, from + (place - first) * shape.kv_heads * D, D * sizeof(T));
        });
    }
}

// Memory in which one thread attends.
template <int W, int R>
struct Desk {
    long most;
    Scratch memory;
    float *keys, *values, *rows, *scores;
    explicit Desk(long most)
        : most(most),
          memory(2 * most * W * LANES + R * (W * LANES + most)),
          keys(memory.at),
          values(keys + most * W * LANES),
          rows(values + most * W * LANES),
          scores(rows + R * W * LANES) {}
};

// Turns a row's scores into weights that still lack the division by their sum, which it gives.
static float weigh(float* score, long seen, float scale, float& peak) {
    Floats peaks = all(-INFINITY), sums = {};
    for (long j = 0; j < seen; j += LANES) peaks = larger(peaks, load(score + j));
    peak = largest(peaks) * scale;
    for (long j = 0; j < seen; j += LANES) {
        Floats p = exponential(load(score + j) * scale - peak);
        store(score + j, p);
        sums += p;
    }
    return sum(sums);
}

// R rows of a task, or fewer, over the keys and values on the desk.
template <class T, int W, int R>
static void attend_rows(const T* query, T* out, float* log_norm, const Tasks& tasks,
                        const Shape& shape, const Rows& own, long task, long first, long count,
                        const Desk<W, R>& desk) {
    constexpr long D = W * LANES;
    for (long r = 0; r < count; r++)
        for (int w = 0; w < W; w++)
            store(desk.rows + r * D + w * LANES,
                  load(query + own.index(tasks, task, first + r) * D + w * LANES));
    long seen = whole(own.place(tasks, task, first + count - 1) + 1);
    multiply<W>(desk.rows, count, desk.keys, seen, desk.scores, desk.most);
    float totals[R];
    for (long r = 0; r < count; r++) {
        float *score = desk.scores + r * desk.most, peak;
        hide(score, own.place(tasks, task, first + r), shape.window, seen);
        totals[r] = weigh(score, seen, shape.scale, peak);
        if (log_norm) log_norm[own.index(tasks, task, first + r)] = logf(totals[r]) + peak;
    }
    Floats mixed[R][W];
    combine<W, R>(desk.scores, desk.most, desk.values, seen, mixed);
    for (long r = 0; r < count; r++)
        for (int w = 0; w < W; w++)
            store(out + own.index(tasks, task, first + r) * D + w * LANES, mixed[r][w] / totals[r]);
}

// `fresh_key` and `fresh_value`, if given, are put in their places first.
template <class T, int W>
static void attend(const T* query, T* key, T* value, const T* fresh_key, const T* fresh_value,
                   T* out, float* log_norm, const Tasks& tasks, const Shape& shape, int threads) {
    constexpr int R = W > 4 ? 2 : 4;
    long most = most_keys(tasks, shape.num_tasks);
    std::vector<Bundle> all_bundles = bundles(tasks, shape);
    long num_items = all_bundles.size() * shape.kv_heads;
#pragma omp parallel num_threads(threads)
    {
        Desk<W, R> desk(most);
        if (fresh_key) {
#pragma omp for schedule(static)
            for (long task = 0; task < shape.num_tasks; task++) {
                put<T, W>(fresh_key, key, tasks, shape, task);
                put<T, W>(fresh_value, value, tasks, shape, task);
            }
        }
#pragma omp for schedule(dynamic, 1)
        for (long item = 0; item < num_items; item++) {
            Bundle bundle = all_bundles[item / shape.kv_heads];
            long head = item % shape.kv_heads;
            Rows own(shape, head);
            for (long task = bundle.first; task < bundle.end; task++) {
                long known = task == bundle.first ? 0 : bundle.shared;
                collect<T, W>(key, tasks, shape, task, head, known, desk.keys);
                collect<T, W>(value, tasks, shape, task, head, known, desk.values);
                if (task + 1 < bundle.end)
                    fetch<T, W>(key, value, tasks, shape, task + 1, head, bundle.shared);
                long num_rows = tasks.num_queries[task] * own.per_query;
                for (long first = 0; first < num_rows; first += R) {
                    long count = num_rows - first < R ? num_rows - first : R;
                    attend_rows<T, W, R>(query, out, log_norm, tasks, shape, own, task, first,
                                         count, desk);
                }
            }
        }
    }
}

// Adds what was summed up for the task's keys in order to where they lie.
template <int W>
static void hand_out(const float* from, const Tasks& tasks, const Shape& shape, long task,
                     long head, long count, float* to) {
    each_key(tasks, shape, task, head, 0, count, [=](long place, long at) {
        for (int w = 0; w < W; w++) {
            float* sum = to + at + w * LANES;
            store(sum, load(sum) + load(from + (place * W + w) * LANES));
        }
    });
}

// sums[j] += sum over r of weights[r, j] rows[r], for so many keys that sums stay in registers.
template <int W>
static void accumulate(const float* weights, long stride, const float* rows, long num_rows,
                       long count, float* sums) {
    constexpr int KEYS = W > 4 ? 2 : 4;  // divides whole vectors of keys
    for (long j = 0; j < count; j += KEYS) {
        Floats sum[KEYS][W];
        for (int k = 0; k < KEYS; k++)
            for (int w = 0; w < W; w++) sum[k][w] = load(sums + ((j + k) * W + w) * LANES);
        for (long r = 0; r < num_rows; r++)
            for (int w = 0; w < W; w++) {
                Floats row = load(rows + (r * W + w) * LANES);
                for (int k = 0; k < KEYS; k++) sum[k][w] += weights[r * stride + j + k] * row;
            }
        for (int k = 0; k < KEYS; k++)
            for (int w = 0; w < W; w++) store(sums + ((j + k) * W + w) * LANES, sum[k][w]);
    }
}

// out[r] = sum over j of weights[r, j] others[j], of any number of rows.
template <int W, class Use>
static void combine_rows(const float* weights, long stride, long num_rows, const float* others,
                         long count, Use use) {
    constexpr int R = W > 4 ? 2 : 4;
    Floats found[R][W], one[1][W];
    long r = 0;
    for (; r + R <= num_rows; r += R) {
        combine<W, R>(weights + r * stride, stride, others, count, found);
        for (int i = 0; i < R; i++) use(r + i, found[i]);
    }
    for (; r < num_rows; r++) {
        combine<W, 1>(weights + r * stride, stride, others, count, one);
        use(r, one[0]);
    }
}

template <class T, int W>
static void attend_backward(const T* grad, const T* query, const T* key, const T* value,
                            const float* log_norm, T* query_grad, float* key_grad,
                            float* value_grad, const long* trees_end, long num_trees,
                            const Tasks& tasks, const Shape& shape, int threads) {
    constexpr long R = 16, D = W * LANES;
    long most = most_keys(tasks, shape.num_tasks);
#pragma omp parallel num_threads(threads)
    {
        Scratch memory(4 * most * D + 2 * R * (D + most));
        float *keys = memory.at, *values = keys + most * D, *rows = values + most * D;
        float *grads = rows + R * D, *key_sums = grads + R * D, *value_sums = key_sums + most * D;
        float *probs = value_sums + most * D, *slopes = probs + R * most;
#pragma omp for schedule(dynamic, 1)
        for (long item = 0; item < num_trees * shape.kv_heads; item++) {
            long tree = item / shape.kv_heads, head = item % shape.kv_heads;
            Rows own(shape, head);
            for (long task = tree ? trees_end[tree - 1] : 0; task < trees_end[tree]; task++) {
                long num_rows = tasks.num_queries[task] * own.per_query;
                long count_keys = num_keys(tasks, task);
                collect<T, W>(key, tasks, shape, task, head, 0, keys);
                collect<T, W>(value, tasks, shape, task, head, 0, values);
                memset(key_sums, 0, whole(count_keys) * D * sizeof(float));
                memset(value_sums, 0, whole(count_keys) * D * sizeof(float));
                for (long first = 0; first < num_rows; first += R) {
                    long count = num_rows - first < R ? num_rows - first : R;
                    for (long r = 0; r < count; r++) {
                        long at = own.index(tasks, task, first + r) * D;
                        for (int w = 0; w < W; w++) {
                            store(rows + r * D + w * LANES, load(query + at + w * LANES));
                            store(grads + r * D + w * LANES, load(grad + at + w * LANES));
                        }
                    }
                    long seen = whole(own.place(tasks, task, first + count - 1) + 1);
                    multiply<W>(rows, count, keys, seen, probs, most);
                    multiply<W>(grads, count, values, seen, slopes, most);
                    for (long r = 0; r < count; r++) {
                        float *prob = probs + r * most, *slope = slopes + r * most;
                        float norm = log_norm[own.index(tasks, task, first + r)];
                        hide(prob, own.place(tasks, task, first + r), shape.window, seen);
                        Floats along = {};
                        for (long j = 0; j < seen; j += LANES) {
                            Floats p = exponential(load(prob + j) * shape.scale - norm);
                            store(prob + j, p);
                            along += p * load(slope + j);
                        }
                        float mean = sum(along);
                        for (long j = 0; j < seen; j += LANES)
                            store(slope + j,
                                  load(prob + j) * (load(slope + j) - mean) * shape.scale);
                    }
                    combine_rows<W>(slopes, most, count, keys, seen, [&](long r, Floats* row) {
                        long at = own.index(tasks, task, first + r) * D;
                        for (int w = 0; w < W; w++) store(query_grad + at + w * LANES, row[w]);
                    });
                    accumulate<W>(slopes, most, rows, count, seen, key_sums);
                    accumulate<W>(probs, most, grads, count, seen, value_sums);
                }
                hand_out<W>(key_sums, tasks, shape, task, head, count_keys, key_grad);
                hand_out<W>(value_sums, tasks, shape, task, head, count_keys, value_grad);
            }
        }
    }
}

#define BY_WIDTH(call)                \
    switch (width / LANES) {          \
        case 1: return call(1);       \
        case 2: return call(2);       \
        case 4: return call(4);       \
        case 6: return call(6);       \
        case 8: return call(8);       \
    }

template <class T>
void attention(const T* query, T* key, T* value, const T* fresh_key, const T* fresh_value, T* out,
               float* log_norm, const Tasks* tasks, const Shape* shape, long width, int threads) {
#define CALL(W)                                                                               \
    attend<T, W>(query, key, value, fresh_key, fresh_value, out, log_norm, *tasks, *shape, threads)
    BY_WIDTH(CALL)
#undef CALL
}

template <class T>
void attention_backward(const T* grad, const T* query, const T* key, const T* value,
                        const float* log_norm, T* query_grad, float* key_grad, float* value_grad,
                        const long* trees_end, long num_trees, const Tasks* tasks,
                        const Shape* shape, long width, int threads) {
#define CALL(W)                                                                           \
    attend_backward<T, W>(grad, query, key, value, log_norm, query_grad, key_grad, value_grad, \
                          trees_end, num_trees, *tasks, *shape, threads)
    BY_WIDTH(CALL)
#undef CALL
}

EXPORT(attention)
EXPORT(attention_backward)
