// Kernels that others call, in C++. Each uses so many threads as it is told.
#pragma once

#include "vector.h"

struct Tasks {
    const long* first_query;  // row of the first query
    const long* num_queries;
    const long* first_place;  // of that query among its keys, counted from 0
    const long* spans_end;    // where the task's spans end in the two below
    const long* span_first;   // where the span begins, in span strides ...
    const long* span_skip;    // ... and key strides (null: 0)
    const long* span_length;  // in keys
};

struct Shape {
    long num_tasks, num_heads, kv_heads;
    long span_stride, key_stride, head_stride;  // in values
    long window;                   // keys a query sees at most
    float scale;
};

template <class T>
void rms_norm(const T* in, const T* weight, T* out, float* scales, long rows, long width, float eps,
              int threads);

// `weight_grads` has a row for each block of rows: sums whose order no number of threads changes.
// `in_grad` may be `grad`.
template <class T>
void rms_norm_backward(const T* grad, const T* in, const T* weight, const float* scales, T* in_grad,
                       float* weight_grads, long rows, long width, long block, int threads);

// `to` += `more`.
template <class T>
void add(T* to, const T* more, long size, int threads);

template <class T>
void silu_mul(const T* gate, const T* up, T* out, long size, int threads);

// `grad` becomes the gradient of `up`.
template <class T>
void silu_mul_backward(T* grad, const T* gate, const T* up, T* out, T* gate_grad, long size,
                       int threads);

template <class T>
void rotate(const T* in, const T* cosine, const T* sine, T* out, long rows, long heads, long width,
            int is_gradient, int threads);

template <class T>
void attention(const T* query, T* key, T* value, const T* fresh_key, const T* fresh_value, T* out,
               float* log_norm, const Tasks* tasks, const Shape* shape, long width, int threads);

// Adds to `key_grad` and `value_grad`. Tasks of one tree share keys, those of different trees don't:
// `trees_end` says where each ends.
template <class T>
void attention_backward(const T* grad, const T* query, const T* key, const T* value,
                        const float* log_norm, T* query_grad, float* key_grad, float* value_grad,
                        const long* trees_end, long num_trees, const Tasks* tasks,
                        const Shape* shape, long width, int threads);
