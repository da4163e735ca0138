// Elementwise layers of a transformer and their gradients, each in one pass over memory.
// Rows are contiguous. What PyTorch rounds to the tensor's dtype on its way is rounded here too.
#include <vector>

#include "kernels.h"

template <class T>
void rms_norm(const T* in, const T* weight, T* out, float* scales, long rows, long width, float eps,
              int threads) {
    EACH_ROW for (long row = 0; row < rows; row++) {
        const T* own = in + row * width;
        Floats squares = {};
        for (long i = 0; i < width; i += LANES) {
            Floats x = load(own + i, width - i);
            squares += x * x;
        }
        float scale = 1 / sqrtf(sum(squares) / width + eps);
        if (scales) scales[row] = scale;
        for (long i = 0; i < width; i += LANES) {
            Floats unit = rounded<T>(load(own + i, width - i) * scale);
            store(out + row * width + i, load(weight + i, width - i) * unit, width - i);
        }
    }
}

template <class T>
void rms_norm_backward(const T* grad, const T* in, const T* weight, const float* scales, T* in_grad,
                       float* weight_grads, long rows, long width, long block, int threads) {
    EACH_ROW for (long first = 0; first < rows; first += block) {
        float* total = weight_grads + first / block * width;
        memset(total, 0, width * sizeof(float));
        for (long row = first; row < rows && row < first + block; row++) {
            const T* x = in + row * width;
            const T* g = grad + row * width;
            Floats products = {};
            for (long i = 0; i < width; i += LANES) {
                Floats product = load(g + i, width - i) * load(x + i, width - i) * scales[row];
                store(total + i, load(total + i, width - i) + product, width - i);
                products += product * load(weight + i, width - i);
            }
            float along = sum(products) / width;
            for (long i = 0; i < width; i += LANES) {
                Floats unit = load(x + i, width - i) * scales[row];
                Floats own = load(g + i, width - i) * load(weight + i, width - i);
                store(in_grad + row * width + i, (own - unit * along) * scales[row], width - i);
            }
        }
    }
}

template <class T>
void add(T* to, const T* more, long size, int threads) {
    EACH_ROW for (long i = 0; i < size; i += LANES)
        store(to + i, load(to + i, size - i) + load(more + i, size - i), size - i);
}

template void add(BFloat16* to, const BFloat16* more, long size, int threads);

template <class T>
void silu_mul(const T* gate, const T* up, T* out, long size, int threads) {
    EACH_ROW for (long i = 0; i < size; i += LANES) {
        Floats g = load(gate + i, size - i);
        store(out + i, rounded<T>(g * sigmoid(g)) * load(up + i, size - i), size - i);
    }
}

template <class T>
void silu_mul_backward(T* grad, const T* gate, const T* up, T* out, T* gate_grad, long size,
                       int threads) {
    EACH_ROW for (long i = 0; i < size; i += LANES) {
        Floats g = load(gate + i, size - i), u = load(up + i, size - i);
        Floats above = load(grad + i, size - i), gated = sigmoid(g);
        Floats active = rounded<T>(g * gated);
        store(out + i, active * u, size - i);
        store(gate_grad + i, above * u * gated * (1.0f + g * (1.0f - gated)), size - i);
        store(grad + i, active * above, size - i);
    }
}

// Rotary embedding of rows of heads, or its gradient; `out` may be `in`.
template <class T>
void rotate(const T* in, const T* cosine, const T* sine, T* out, long rows, long heads, long width,
            int is_gradient, int threads) {
    long half = width / 2;
    EACH_ROW for (long row = 0; row < rows; row++)
        for (long i = 0; i < half; i += LANES) {
            long count = half - i;
            const T *cosines = cosine + row * width + i, *sines = sine + row * width + i;
            Floats cos1 = load(cosines, count), cos2 = load(cosines + half, count);
            Floats sin1 = load(sines, count), sin2 = load(sines + half, count);
            if (is_gradient) {
                Floats kept = sin1;
                sin1 = -sin2;
                sin2 = -kept;
            }
            for (long at = row * heads * width + i; at < (row + 1) * heads * width; at += width) {
                Floats x1 = load(in + at, count), x2 = load(in + at + half, count);
                Floats y1 = rounded<T>(x1 * cos1) - rounded<T>(x2 * sin1);
                Floats y2 = rounded<T>(x2 * cos2) + rounded<T>(x1 * sin2);
                store(out + at, y1, count);
                store(out + at + half, y2, count);
            }
        }
}

constexpr long GROUP = 64 * LANES;  // values added up on their own: long sums stay exact

// The largest of a row's logits, times a factor.
template <class T>
static float peak_of(const T* own, long width, float factor) {
    constexpr int WAYS = 4;  // at a time: one would wait for the one before it
    Floats peaks[WAYS];
    for (Floats& peak : peaks) peak = all(-INFINITY);
    long i = 0;
    for (; i + WAYS * LANES <= width; i += WAYS * LANES)
        for (int way = 0; way < WAYS; way++)
            peaks[way] = larger(peaks[way], load(own + i + way * LANES));
    for (; i < width; i += LANES) peaks[0] = larger(peaks[0], load(own + i, width - i, -INFINITY));
    for (int way = 1; way < WAYS; way++) peaks[0] = larger(peaks[0], peaks[way]);
    return largest(peaks[0]) * factor;
}

// How far logits times a factor lie below the peak.
template <class T>
static Floats below_peak(const T* own, long i, long width, float factor, float peak) {
    return load(own + i, width - i, -INFINITY) * factor - peak;
}

template <class T>
static float log_of(const T* own, long token, float factor, float log_norm) {
    T picked = own[token];
    return load(&picked, 1)[0] * factor - log_norm;
}

// Of softmax(logits / divisor): log-probability of the target, log of the norm, and entropy.
template <class T>
static void token_statistics(const T* logits, const float* divisor, const long* target,
                             float* logprob, float* log_norm, float* entropy, long rows, long width,
                             int threads) {
    EACH_ROW for (long row = 0; row < rows; row++) {
        const T* own = logits + row * width;
        float factor = 1 / divisor[row], peak = peak_of(own, width, factor), total = 0, mean = 0;
        for (long first = 0; first < width; first += GROUP) {
            Floats probs = {}, means = {};
            for (long i = first; i < width && i < first + GROUP; i += LANES) {
                Floats below = below_peak(own, i, width, factor, peak);
                Floats p = exponential(below);
                probs += p;
                means += p > 0.0f ? p * below : p;
            }
            total += sum(probs);
            mean += sum(means);
        }
        log_norm[row] = logf(total) + peak;
        logprob[row] = log_of(own, target[row], factor, log_norm[row]);
        if (entropy) entropy[row] = logf(total) - mean / total;
    }
}

// The first token of a group at which its running sum of probabilities reaches the goal, which is
// above 0; if rounding keeps it from that, the last that has a probability.
template <class T>
static long found_in(const T* own, long first, long width, float factor, float peak, double goal) {
    long end = first + GROUP < width ? first + GROUP : width, found = first;
    double running = 0;
    for (long i = first; i < end; i += LANES) {
        float probs[LANES];
        store(probs, exponential(below_peak(own, i, width, factor, peak)));
        for (long lane = 0; lane < LANES; lane++) {
            running += probs[lane];
            if (probs[lane] > 0) found = i + lane;
            if (probs[lane] > 0 && running >= goal) return found;
        }
    }
    return found;
}

// Draws from softmax(logits / divisor) by a number between 0 and 1; what is said of the token is as
// in `token_statistics`.
template <class T>
static void draw_tokens(const T* logits, const float* divisor, const double* uniform, long* token,
                        float* logprob, float* log_norm, long rows, long width, int threads) {
    EACH_ROW for (long row = 0; row < rows; row++) {
        const T* own = logits + row * width;
        float factor = 1 / divisor[row], peak = peak_of(own, width, factor), total = 0;
        std::vector<double> running;  // sums of probabilities up to the end of each group
        for (long first = 0; first < width; first += GROUP) {
            Floats probs = {};
            for (long i = first; i < width && i < first + GROUP; i += LANES)
                probs += exponential(below_peak(own, i, width, factor, peak));
            total += sum(probs);
            running.push_back(sum(probs) + (first ? running.back() : 0));
        }
        double goal = uniform[row] * running.back();
        size_t group = 0;
        while (group + 1 < running.size() && !(running[group] >= goal)) group++;
        double rest = goal - (group ? running[group - 1] : 0);
        token[row] = found_in(own, group * GROUP, width, factor, peak, rest);
        log_norm[row] = logf(total) + peak;
        logprob[row] = log_of(own, token[row], factor, log_norm[row]);
    }
}

// Replaces logits by the gradient at them: g (1[target] - p) - e p (log p + H), both divided before.
template <class T>
static void logit_gradient(T* logits, const float* divisor, const long* target,
                           const float* log_norm, const float* entropy, const float* grad_logprob,
                           const float* grad_entropy, long rows, long width, int threads) {
    EACH_ROW for (long row = 0; row < rows; row++) {
        T* own = logits + row * width;
        float factor = 1 / divisor[row], given = grad_logprob[row];
        float spread = grad_entropy[row], mean = entropy[row];
        T* picked = own + target[row];
        Floats log_p = load(picked, 1) * factor - log_norm[row];
        Floats at_target = given - exponential(log_p) * (given + spread * (log_p + mean));
        for (long i = 0; i < width; i += LANES) {
            Floats log_q = load(own + i, width - i) * factor - log_norm[row];
            Floats weight = given + spread * (log_q + mean);
            store(own + i, -exponential(log_q) * weight, width - i);
        }
        store(picked, at_target, 1);
    }
}

EXPORT(rms_norm)
EXPORT(rms_norm_backward)
EXPORT(silu_mul)
EXPORT(silu_mul_backward)
EXPORT(rotate)
EXPORT(token_statistics)
EXPORT(draw_tokens)
EXPORT(logit_gradient)
