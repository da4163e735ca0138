// All layers of a decoder in one call, without gradient: those kernels, in the order in which the
// layers' modules call them, so that the bits are the same.
#include "kernels.h"
#include "products.h"

namespace {

struct Linear {
    const BFloat16 *packed, *bias;  // bias may be null
    Output to(BFloat16* out, long columns) const { return {packed, bias, out, columns}; }
};

struct Layer {
    Linear query, key, value, mixed, gate, up, down;
    const BFloat16 *input_norm, *query_norm, *key_norm, *inner_norm;  // those of heads may be null
    long window;
    BFloat16 *sample_keys, *sample_values, *prompt_keys, *prompt_values;
};

struct Sizes {
    long num_layers, width, inner, heads, kv_heads, head_size;
    float eps;
};

// Tokens that attend alike: the first ones are samples' newest, then come pieces of prompts.
struct Part {
    const Tasks* tasks;
    const Shape* shape;
    long num_tokens;
};

// Normalises heads where the layer does, and turns them by their position.
void place_heads(BFloat16* rows, const BFloat16* norm, const BFloat16* cosine,
                        const BFloat16* sine, const Sizes& sizes, long num_rows, long heads,
                        int threads) {
    if (norm)
        rms_norm(rows, norm, rows, nullptr, num_rows * heads, sizes.head_size, sizes.eps, threads);
    rotate(rows, cosine, sine, rows, num_rows, heads, sizes.head_size, 0, threads);
}

void attend(const BFloat16* query, const BFloat16* key, const BFloat16* value,
                   BFloat16* stored_keys, BFloat16* stored_values, BFloat16* out, const Part& part,
                   long window, long head_size, int threads) {
    Shape shape = *part.shape;
    shape.window = window;
    attention(query, stored_keys, stored_values, key, value, out, nullptr, part.tasks, &shape,
              head_size, threads);
}

}  // namespace

// Hidden states [num_rows, width] before the first layer become those after the last. `room` is for
// 2 (width + heads + kv_heads + inner) numbers a row, heads in numbers too.
extern "C" void decode(BFloat16* hidden, const BFloat16* cosine, const BFloat16* sine,
                       long num_rows, const Layer* layers, const Sizes* sizes, const Part* samples,
                       const Part* prompts, BFloat16* room, int threads) {
    long width = sizes->width, inner = sizes->inner, size = sizes->head_size;
    long heads = sizes->heads * size, kv_heads = sizes->kv_heads * size;
    BFloat16 *normed = room, *more = normed + num_rows * width, *query = more + num_rows * width;
    BFloat16 *mixed = query + num_rows * heads, *key = mixed + num_rows * heads;
    BFloat16 *value = key + num_rows * kv_heads, *gate = value + num_rows * kv_heads;
    BFloat16* up = gate + num_rows * inner;
    long first = samples->num_tokens, end = first + prompts->num_tokens;
    for (long i = 0; i < sizes->num_layers; i++) {
        const Layer& own = layers[i];
        rms_norm(hidden, own.input_norm, normed, nullptr, num_rows, width, sizes->eps, threads);
        multiply<3>(Right::packed, normed, width,
                    {own.query.to(query, heads), own.key.to(key, kv_heads),
                     own.value.to(value, kv_heads)},
                    num_rows, threads);
        place_heads(query, own.query_norm, cosine, sine, *sizes, num_rows, sizes->heads, threads);
        place_heads(key, own.key_norm, cosine, sine, *sizes, num_rows, sizes->kv_heads, threads);
        if (first)
            attend(query, key, value, own.sample_keys, own.sample_values, mixed, *samples,
                   own.window, size, threads);
        if (end > first)
            attend(query + first * heads, key + first * kv_heads, value + first * kv_heads,
                   own.prompt_keys, own.prompt_values, mixed + first * heads, *prompts, own.window,
                   size, threads);
        memset(mixed + end * heads, 0, (num_rows - end) * heads * sizeof *mixed);
        multiply<1>(Right::packed, mixed, heads, {own.mixed.to(more, width)}, num_rows, threads);
        add(hidden, more, num_rows * width, threads);
        rms_norm(hidden, own.inner_norm, normed, nullptr, num_rows, width, sizes->eps, threads);
        multiply<2>(Right::packed, normed, width,
                    {own.gate.to(gate, inner), own.up.to(up, inner)}, num_rows, threads);
        silu_mul(gate, up, gate, num_rows * inner, threads);
        multiply<1>(Right::packed, gate, inner, {own.down.to(more, width)}, num_rows, threads);
        add(hidden, more, num_rows * width, threads);
    }
}
