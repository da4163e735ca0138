// Products of bfloat16 matrices, as products.cpp computes them.
#pragma once

#include "vector.h"

struct Term {  // of a sum of products: [rows, depth] times [depth, columns], both in rows
    const BFloat16 *left, *right;
    long left_row, right_row, depth;
};

enum class Right : int { packed, transposed, plain };  // transposed: [columns, depth] in rows

struct Product {  // out[rows, columns] = the sum of the terms' products, + bias
    const Term* terms;
    long num_terms;
    Right right;
    const BFloat16* bias;  // may be null
    BFloat16* out;
    long out_row, columns;
};

// Each of `products`, with `rows` rows. Where the processor is not for it there is none, which
// `has_products` says.
extern "C" __attribute__((weak)) void compute_products(const Product* products, long num_products,
                                                       long rows, int threads);

struct Output {
    const BFloat16 *weight, *bias;
    BFloat16* out;
    long columns;
};

// The same rows by several layers, whose weights lie alike.
template <int N>
static void multiply(Right right, const BFloat16* rows, long depth, const Output (&outputs)[N],
                     long num_rows, int threads) {
    Term terms[N];
    Product products[N];
    for (int i = 0; i < N; i++) {
        auto [weight, bias, out, columns] = outputs[i];
        terms[i] = {rows, weight, depth, depth, depth};
        products[i] = {terms + i, 1, right, bias, out, columns, columns};
    }
    compute_products(products, N, num_rows, threads);
}

// total[height, width] += left[depth, height]^T right[depth, width], in float32.
extern "C" __attribute__((weak)) void add_transposed_product(
    const BFloat16* left, long left_row, const BFloat16* right, long right_row, float* total,
    long total_row, long depth, long height, long width, int threads);
