// A decoder layer in one call, and its gradients in another: the kernels of the layers' modules in
// the order in which these call them, so that the bits are the same.
#include "kernels.h"
#include "products.h"

namespace {

struct Linear {
    const BFloat16 *weight, *bias;  // the bias may be null
    float *gradient, *bias_gradient;  // where they add up; null: not wanted
    Output to(BFloat16* out, long columns) const { return {weight, bias, out, columns}; }
};

struct Norm {
    const BFloat16* weight;
    float* gradient;
};

struct Layer {
    Linear query, key, value, mixed, gate, up, down;
    Norm input_norm, query_norm, key_norm, inner_norm;  // those of heads may have no weight
};

struct Sizes {
    long rows, width, inner, heads, kv_heads, head_size;
    float eps;
    long of_heads() const { return heads * head_size; }
    long of_kv_heads() const { return kv_heads * head_size; }
};

// Memory that is handed out piece by piece.
template <class T>
struct Room {
    T* at;
    T* take(long count) {
        T* found = at;
        at += (count + 31) / 32 * 32;  // pieces begin at whole lines of the cache
        return found;
    }
};

// What the backward pass needs of the forward pass.
struct Kept {
    BFloat16 *query, *key, *value, *mixed, *middle, *gate, *up, *plain_query, *plain_key;
    float *input_scale, *inner_scale, *log_norm, *query_scale, *key_scale;
    Kept(BFloat16* values, float* scales, const Layer& layer, const Sizes& sizes) {
        Room<BFloat16> wide{values};
        Room<float> narrow{scales};
        long rows = sizes.rows;
        query = wide.take(rows * sizes.of_heads());
        key = wide.take(rows * sizes.of_kv_heads());
        value = wide.take(rows * sizes.of_kv_heads());
        mixed = wide.take(rows * sizes.of_heads());
        middle = wide.take(rows * sizes.width);
        gate = wide.take(rows * sizes.inner);
        up = wide.take(rows * sizes.inner);
        plain_query = layer.query_norm.weight ? wide.take(rows * sizes.of_heads()) : query;
        plain_key = layer.key_norm.weight ? wide.take(rows * sizes.of_kv_heads()) : key;
        input_scale = narrow.take(rows);
        inner_scale = narrow.take(rows);
        log_norm = narrow.take(rows * sizes.heads);
        query_scale = layer.query_norm.weight ? narrow.take(rows * sizes.heads) : nullptr;
        key_scale = layer.key_norm.weight ? narrow.take(rows * sizes.kv_heads) : nullptr;
    }
};

void narrow(const float* from, BFloat16* to, long size, int threads) {
    EACH_ROW for (long i = 0; i < size; i += LANES)
        store(to + i, load(from + i, size - i), size - i);
}

struct Given {
    const BFloat16* grad;  // [rows, columns], at what a linear layer gave
    const Linear& linear;
    long columns;
};

// Gradient at the rows [num_rows, width] that linear layers got.
template <int N>
void multiply_backward(const Given (&given)[N], long width, long num_rows, BFloat16* at_rows,
                       int threads) {
    Term terms[N];
    for (int i = 0; i < N; i++) {
        auto [grad, linear, columns] = given[i];
        terms[i] = {grad, linear.weight, columns, width, columns};
    }
    Product product = {terms, N, Right::plain, nullptr, at_rows, width, width};
    compute_products(&product, 1, num_rows, threads);
}

// Adds up the gradients of linear layers that got these rows.
template <int N>
void add_gradients(const Given (&given)[N], const BFloat16* rows, long width, long num_rows,
                   int threads) {
    for (auto [grad, linear, columns] : given) {
        if (linear.gradient)
            add_transposed_product(grad, columns, rows, width, linear.gradient, width, num_rows,
                                   columns, width, threads);
        if (float* total = linear.bias_gradient)
            EACH_ROW for (long c = 0; c < columns; c += LANES) {
                Floats sum = load(total + c, columns - c);
                for (long r = 0; r < num_rows; r++)
                    sum += load(grad + r * columns + c, columns - c);
                store(total + c, sum, columns - c);
            }
    }
}

// `at_rows` may be `grad`.
void norm_backward(const BFloat16* grad, const BFloat16* rows, const Norm& norm,
                   const float* scales, BFloat16* at_rows, long num_rows, long width, float* parts,
                   int threads) {
    constexpr long BLOCK = 64;
    rms_norm_backward(grad, rows, norm.weight, scales, at_rows, parts, num_rows, width, BLOCK,
                      threads);
    if (!norm.gradient) return;
    for (long i = 0; i < width; i += LANES) {
        Floats total = load(norm.gradient + i, width - i);
        for (long first = 0; first < num_rows; first += BLOCK)
            total += load(parts + first / BLOCK * width + i, width - i);
        store(norm.gradient + i, total, width - i);
    }
}

}  // namespace

extern "C" {

// [rows, width] out of `hidden`. `room` is for width + inner numbers a row.
void layer_forward(const Layer* layer, const Sizes* sizes, const BFloat16* hidden,
                   const BFloat16* cosine, const BFloat16* sine, const Tasks* tasks,
                   const Shape* shape, BFloat16* kept_values, float* kept_scales, BFloat16* room,
                   BFloat16* out, int threads) {
    const Layer& own = *layer;
    auto [rows, width, inner, heads, kv_heads, head_size, eps] = *sizes;
    long of_heads = sizes->of_heads(), of_kv_heads = sizes->of_kv_heads();
    Kept kept(kept_values, kept_scales, own, *sizes);
    Room<BFloat16> pieces{room};
    BFloat16 *normed = pieces.take(rows * width), *active = pieces.take(rows * inner);
    rms_norm(hidden, own.input_norm.weight, normed, kept.input_scale, rows, width, eps, threads);
    multiply<3>(Right::transposed, normed, width,
                {own.query.to(kept.plain_query, of_heads), own.key.to(kept.plain_key, of_kv_heads),
                 own.value.to(kept.value, of_kv_heads)},
                rows, threads);
    if (own.query_norm.weight)
        rms_norm(kept.plain_query, own.query_norm.weight, kept.query, kept.query_scale,
                 rows * heads, head_size, eps, threads);
    if (own.key_norm.weight)
        rms_norm(kept.plain_key, own.key_norm.weight, kept.key, kept.key_scale, rows * kv_heads,
                 head_size, eps, threads);
    rotate(kept.query, cosine, sine, kept.query, rows, heads, head_size, 0, threads);
    rotate(kept.key, cosine, sine, kept.key, rows, kv_heads, head_size, 0, threads);
    attention<BFloat16>(kept.query, kept.key, kept.value, nullptr, nullptr, kept.mixed,
                        kept.log_norm, tasks, shape, head_size, threads);
    multiply<1>(Right::transposed, kept.mixed, of_heads, {own.mixed.to(kept.middle, width)}, rows,
                threads);
    add(kept.middle, hidden, rows * width, threads);
    rms_norm(kept.middle, own.inner_norm.weight, normed, kept.inner_scale, rows, width, eps,
             threads);
    multiply<2>(Right::transposed, normed, width,
                {own.gate.to(kept.gate, inner), own.up.to(kept.up, inner)}, rows, threads);
    silu_mul(kept.gate, kept.up, active, rows * inner, threads);
    multiply<1>(Right::transposed, active, inner, {own.down.to(out, width)}, rows, threads);
    add(out, kept.middle, rows * width, threads);
}

// The gradient at `hidden` from that at what the layer gave; those at its weights add up. `room` is
// for 3 (width + inner) + 2 (heads + kv_heads) numbers a row, heads in numbers too, `sums` for
// 2 kv_heads a row, and width numbers (or head_size ones) for each block of a norm's rows.
void layer_backward(const Layer* layer, const Sizes* sizes, const BFloat16* hidden,
                    const BFloat16* cosine, const BFloat16* sine, const Tasks* tasks,
                    const Shape* shape, const long* trees_end, long num_trees,
                    BFloat16* kept_values, float* kept_scales, const BFloat16* grad,
                    BFloat16* at_hidden, BFloat16* room, float* sums, int threads) {
    const Layer& own = *layer;
    auto [rows, width, inner, heads, kv_heads, head_size, eps] = *sizes;
    long of_heads = sizes->of_heads(), of_kv_heads = sizes->of_kv_heads();
    Kept kept(kept_values, kept_scales, own, *sizes);
    Room<BFloat16> pieces{room};
    BFloat16 *normed = pieces.take(rows * width), *at_normed = pieces.take(rows * width);
    BFloat16* at_middle = pieces.take(rows * width);
    BFloat16 *at_up = pieces.take(rows * inner), *at_gate = pieces.take(rows * inner);
    BFloat16 *active = pieces.take(rows * inner), *at_mixed = pieces.take(rows * of_heads);
    BFloat16 *at_query = pieces.take(rows * of_heads), *at_key = pieces.take(rows * of_kv_heads);
    BFloat16* at_value = pieces.take(rows * of_kv_heads);
    Room<float> floats{sums};
    float *key_sums = floats.take(rows * of_kv_heads), *value_sums = floats.take(rows * of_kv_heads);
    float* parts = floats.at;
    multiply_backward<1>({{grad, own.down, width}}, inner, rows, at_up, threads);
    silu_mul_backward(at_up, kept.gate, kept.up, active, at_gate, rows * inner, threads);
    add_gradients<1>({{grad, own.down, width}}, active, inner, rows, threads);
    rms_norm(kept.middle, own.inner_norm.weight, normed, nullptr, rows, width, eps, threads);
    const Given at_inner[] = {{at_gate, own.gate, inner}, {at_up, own.up, inner}};
    multiply_backward(at_inner, width, rows, at_normed, threads);
    add_gradients(at_inner, normed, width, rows, threads);
    norm_backward(at_normed, kept.middle, own.inner_norm, kept.inner_scale, at_middle, rows, width,
                  parts, threads);
    add(at_middle, grad, rows * width, threads);

    multiply_backward<1>({{at_middle, own.mixed, width}}, of_heads, rows, at_mixed, threads);
    add_gradients<1>({{at_middle, own.mixed, width}}, kept.mixed, of_heads, rows, threads);
    memset(key_sums, 0, rows * of_kv_heads * sizeof(float));
    memset(value_sums, 0, rows * of_kv_heads * sizeof(float));
    attention_backward<BFloat16>(at_mixed, kept.query, kept.key, kept.value, kept.log_norm,
                                 at_query, key_sums, value_sums, trees_end, num_trees, tasks,
                                 shape, head_size, threads);
    narrow(key_sums, at_key, rows * of_kv_heads, threads);
    narrow(value_sums, at_value, rows * of_kv_heads, threads);
    rotate(at_query, cosine, sine, at_query, rows, heads, head_size, 1, threads);
    rotate(at_key, cosine, sine, at_key, rows, kv_heads, head_size, 1, threads);
    if (own.query_norm.weight)
        norm_backward(at_query, kept.plain_query, own.query_norm, kept.query_scale, at_query,
                      rows * heads, head_size, parts, threads);
    if (own.key_norm.weight)
        norm_backward(at_key, kept.plain_key, own.key_norm, kept.key_scale, at_key,
                      rows * kv_heads, head_size, parts, threads);
    rms_norm(hidden, own.input_norm.weight, normed, nullptr, rows, width, eps, threads);
    const Given at_heads[] = {{at_query, own.query, of_heads},
                              {at_key, own.key, of_kv_heads},
                              {at_value, own.value, of_kv_heads}};
    multiply_backward(at_heads, width, rows, at_normed, threads);
    add_gradients(at_heads, normed, width, rows, threads);
    norm_backward(at_normed, hidden, own.input_norm, kept.input_scale, at_hidden, rows, width,
                  parts, threads);
    add(at_hidden, at_middle, rows * width, threads);
}
}
