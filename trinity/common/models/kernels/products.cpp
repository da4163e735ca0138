// Products of bfloat16 matrices, added up in float32 along their whole depth in one order: a row of
// the result has the same bits whatever rows are computed beside it.
//
// A tile of ROWS x COLUMNS sums stays in registers. What it reads on the right side is packed:
// panels of COLUMNS columns, each of them pairs of numbers along the depth (a "word", as
// vdpbf16ps multiplies them), COLUMNS words after each other.
//
// Where the processor has matrix tiles (AMX), or no bfloat16 products, PyTorch's library is faster.
#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__) && \
    !defined(__AMX_BF16__)
#define HAS_PRODUCTS 1
#else
#define HAS_PRODUCTS 0
#endif

extern "C" {
extern const int has_products = HAS_PRODUCTS;
}

#if HAS_PRODUCTS
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "products.h"

namespace {

constexpr long ROWS = 9, VECTORS = 3, COLUMNS = VECTORS * LANES;
constexpr long LINE = 32;  // numbers of a line of the cache
constexpr long DEPTH = 1536;      // of a block whose panel stays in the second cache
constexpr long HEIGHT = 1008;     // rows whose sums stay there where there are several blocks
constexpr long STRIPE_TILES = 8;  // of packed rows that use a panel one after the other
constexpr long STEP = 64;         // rows that all tiles of a stripe take while they are cached
constexpr long STRETCH = 512;     // numbers of a row that are asked for at once

long ceil_div(long a, long b) { return (a + b - 1) / b; }

__mmask16 first_lanes(long count) {
    return count >= LANES ? 0xffff : count <= 0 ? 0 : (1u << count) - 1;
}

// Memory of a thread that stays: to ask for it anew costs pages.
struct Scratch {
    void* at = nullptr;
    long size = 0;
    template <class T>
    T* room(long count) {
        long bytes = ceil_div(count * (long)sizeof(T), 4096) * 4096;
        if (bytes > size) {
            free(at);
            at = aligned_alloc(4096, bytes);
            if (!at) abort();  // as the kernel's killer would
            size = bytes;
        }
        return (T*)at;
    }
    ~Scratch() { free(at); }
};

thread_local Scratch own_panel, own_sums, own_stripe, all_panels;

// sums[COUNT, COLUMNS] = (or +=, with `adds`) rows times a panel. A word of the left side lies
// `row` numbers after that of the row above it, and `step` after the one before it.
template <int COUNT>
void tile(const BFloat16* left, long row, long step, const BFloat16* panel, long words, float* sums,
          long sums_row, bool adds) {
    __m512 total[COUNT][VECTORS];
    for (int r = 0; r < COUNT; r++)
        for (int v = 0; v < VECTORS; v++) {
            total[r][v] = _mm512_setzero_ps();
            _mm_prefetch((const char*)(sums + r * sums_row + v * LANES), _MM_HINT_ET0);
        }
    for (long w = 0; w < words; w++) {
        if (w % 16 == 0)
#pragma GCC unroll 16
            for (int r = 0; r < COUNT; r++)
                _mm_prefetch((const char*)(left + (r + COUNT) * row + w * step), _MM_HINT_T0);
        __m512bh columns[VECTORS];
        for (int v = 0; v < VECTORS; v++)
            columns[v] = (__m512bh)_mm512_load_si512(panel + (w * VECTORS + v) * 2 * LANES);
#pragma GCC unroll 16
        for (int r = 0; r < COUNT; r++) {
            int word;
            memcpy(&word, left + r * row + w * step, sizeof word);
            __m512bh repeated = (__m512bh)_mm512_set1_epi32(word);
            for (int v = 0; v < VECTORS; v++)
                total[r][v] = _mm512_dpbf16_ps(total[r][v], repeated, columns[v]);
        }
    }
    for (int r = 0; r < COUNT; r++)
        for (int v = 0; v < VECTORS; v++) {
            float* to = sums + r * sums_row + v * LANES;
            _mm512_storeu_ps(to, adds ? total[r][v] + _mm512_loadu_ps(to) : total[r][v]);
        }
}

typedef void (*Tile)(const BFloat16*, long, long, const BFloat16*, long, float*, long, bool);
const Tile TILES[] = {nullptr, tile<1>, tile<2>, tile<3>, tile<4>,
                      tile<5>, tile<6>, tile<7>, tile<8>, tile<9>};
static_assert(sizeof TILES / sizeof *TILES == ROWS + 1, "a tile for each number of rows");

// Words from rows of [depth, count]: `width` of them after each other, 0 where there is nothing.
void pack_rows(const BFloat16* from, long row, long depth, long count, long width, BFloat16* to) {
    for (long k = 0; k < depth; k += 2, to += 2 * width, from += 2 * row)
        for (long c = 0; c < width; c += LANES) {
            __mmask16 given = first_lanes(count - c);
            __m256i low = _mm256_maskz_loadu_epi16(given, from + c);
            __m256i high = _mm256_maskz_loadu_epi16(k + 1 < depth ? given : 0, from + row + c);
            __m512i words = _mm512_or_si512(
                _mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
            _mm512_mask_storeu_epi32(to + 2 * c, first_lanes(width - c), words);
        }
}

void transpose(__m512i (&rows)[LANES]) {
    __m512i pairs[LANES], quads[LANES];
    for (int i = 0; i < LANES; i += 2) {
        pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < LANES; i += 4)
        for (int j = 0; j < 2; j++) {
            quads[i + 2 * j] = _mm512_unpacklo_epi64(pairs[i + j], pairs[i + j + 2]);
            quads[i + 2 * j + 1] = _mm512_unpackhi_epi64(pairs[i + j], pairs[i + j + 2]);
        }
    for (int i = 0; i < LANES; i += 8)
        for (int j = 0; j < 4; j++) {
            pairs[i + j] = _mm512_shuffle_i32x4(quads[i + j], quads[i + j + 4], 0x88);
            pairs[i + j + 4] = _mm512_shuffle_i32x4(quads[i + j], quads[i + j + 4], 0xdd);
        }
    for (int j = 0; j < 8; j++) {
        rows[j] = _mm512_shuffle_i32x4(pairs[j], pairs[j + 8], 0x88);
        rows[j + 8] = _mm512_shuffle_i32x4(pairs[j], pairs[j + 8], 0xdd);
    }
}

// A panel from rows of [count, depth].
void pack_columns(const BFloat16* from, long row, long depth, long count, BFloat16* to) {
    for (long v = 0; v < VECTORS; v++)
        for (long k = 0; k < depth; k += 2 * LANES) {
            long first = v * LANES, given = std::min(count - first, LANES);
            if (k % STRETCH == 0)
                for (long i = 0; i < given; i++)
                    for (long j = k; j < std::min(k + STRETCH, depth); j += LINE)
                        _mm_prefetch((const char*)(from + (first + i) * row + j), _MM_HINT_T0);
            long words = std::min(LANES, (depth - k) / 2);
            __m512i lines[LANES];
            for (long i = 0; i < LANES; i++)
                lines[i] = i < given ? _mm512_maskz_loadu_epi32(first_lanes(words),
                                                                from + (first + i) * row + k)
                                     : _mm512_setzero_si512();
            transpose(lines);
            for (long w = 0; w < words; w++)
                _mm512_store_si512(to + ((k / 2 + w) * VECTORS + v) * 2 * LANES, lines[w]);
        }
}

// Lines of `count` numbers of each row, which will be written.
void prefetch_rows(const BFloat16* from, long row, long rows, long count) {
    for (long r = 0; r < rows; r++)
        for (long c = 0; c < count; c += LINE)
            _mm_prefetch((const char*)(from + r * row + c), _MM_HINT_ET0);
}

// Of the right side of a term, the rows of the product from `k` on.
struct Block {
    const Term* term;
    Right right;
    long k, depth;

    // A panel of it, packed into `room` if it isn't yet.
    const BFloat16* panel(long column, long count, BFloat16* room) const {
        const BFloat16* from = term->right;
        long row = term->right_row;
        switch (right) {
            case Right::packed:
                return from + column * term->depth + k * COLUMNS;
            case Right::transposed:
                pack_columns(from + column * row + k, row, depth, count, room);
                return room;
            default:
                pack_rows(from + k * row + column, row, depth, count, COLUMNS, room);
                return room;
        }
    }

    // Part `i` of `parts` of a panel on its way to the cache.
    void prefetch(long column, long columns, long i, long parts) const {
        long row = term->right_row, count = std::min(COLUMNS, columns - column);
        if (right == Right::packed) {
            const BFloat16* from = term->right + column * term->depth + k * COLUMNS;
            for (long j = i * depth / parts * COLUMNS; j < (i + 1) * depth / parts * COLUMNS;
                 j += LINE)
                _mm_prefetch((const char*)(from + j), _MM_HINT_T1);
        } else if (right == Right::transposed) {
            for (long c = i * count / parts; c < (i + 1) * count / parts; c++)
                for (long j = 0; j < depth; j += LINE)
                    _mm_prefetch((const char*)(term->right + (column + c) * row + k + j),
                                 _MM_HINT_T1);
        } else {
            for (long j = k + i * depth / parts; j < k + (i + 1) * depth / parts; j++)
                for (long c = 0; c < count; c += LINE)
                    _mm_prefetch((const char*)(term->right + j * row + column + c), _MM_HINT_T1);
        }
    }
};

// out[rows, count] = sums + bias, rounded.
void round_sums(const float* sums, const BFloat16* bias, long rows, long count, BFloat16* out,
                long row) {
    for (long c = 0; c < count; c += LANES) {
        __mmask16 given = first_lanes(count - c);
        __m512 added = _mm512_setzero_ps();
        if (bias)
            added = (__m512)_mm512_slli_epi32(
                _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(given, bias + c)), 16);
        for (long r = 0; r < rows; r++) {
            __m512 found = _mm512_loadu_ps(sums + r * COLUMNS + c) + added;
            _mm256_mask_storeu_epi16(out + r * row + c, given,
                                     (__m256i)_mm512_cvtneps_pbh(found));
        }
    }
}

// `height` rows from `top` on of the panel at `column`; the one at `ahead` comes after it.
void compute_panel(const Product& product, long column, long ahead, long top, long height,
                   BFloat16* room, float* sums, bool is_one_block) {
    auto [terms, num_terms, right, bias, out, out_row, columns] = product;
    long tiles = ceil_div(height, ROWS), count = std::min(COLUMNS, columns - column);
    for (long t = 0; t < num_terms; t++)
        for (long k = 0; k < terms[t].depth; k += DEPTH) {
            const Term& term = terms[t];
            Block block{&term, right, k, std::min(DEPTH, term.depth - k)};
            const BFloat16* packed = block.panel(column, count, room);
            bool is_last = t + 1 == num_terms && k + block.depth == term.depth;
            for (long i = 0; i < tiles; i++) {
                long first = i * height / tiles, next = (i + 1) * height / tiles;
                float* own = sums + (is_one_block ? 0 : first * COLUMNS);
                BFloat16* to = out + (top + first) * out_row + column;
                if (ahead < columns) block.prefetch(ahead, columns, i, tiles);
                if (is_last) prefetch_rows(to, out_row, next - first, count);
                TILES[next - first](term.left + (top + first) * term.left_row + k,
                                    term.left_row, 2, packed, block.depth / 2, own, COLUMNS,
                                    t > 0 || k > 0);
                if (is_last)
                    round_sums(own, bias ? bias + column : nullptr, next - first, count, to,
                               out_row);
            }
        }
}

}  // namespace

extern "C" {

void compute_products(const Product* products, long num_products, long rows, int threads) {
    long deepest = 0, pairs = 0;
    bool is_one_block = true;  // then sums need not wait for others
    for (const Product* p = products; p < products + num_products; p++) {
        for (long t = 0; t < p->num_terms; t++) deepest = std::max(deepest, p->terms[t].depth);
        is_one_block = is_one_block && p->num_terms == 1;
        pairs += ceil_div(p->columns, 2 * COLUMNS);
    }
    is_one_block = is_one_block && deepest <= DEPTH;
    long parts = std::max(is_one_block ? 1 : ceil_div(rows, HEIGHT), ceil_div(threads, pairs));
#pragma omp parallel num_threads(threads)
    {
        BFloat16* room = own_panel.room<BFloat16>(COLUMNS * std::min(DEPTH, deepest));
        float* sums = own_sums.room<float>((is_one_block ? ROWS : ceil_div(rows, parts)) * COLUMNS);
        // Two panels after each other by the same thread: they share lines of the result.
#pragma omp for schedule(dynamic, 1)
        for (long item = 0; item < parts * pairs; item++) {
            long part = item / pairs, pair = item % pairs;
            const Product* product = products;
            for (; pair * 2 * COLUMNS >= product->columns; product++)
                pair -= ceil_div(product->columns, 2 * COLUMNS);
            long top = part * rows / parts, height = (part + 1) * rows / parts - top;
            for (long panel = 2 * pair; panel < 2 * pair + 2; panel++) {
                long ahead = panel + (panel % 2 ? 2 * threads - 1 : 1);
                if (panel * COLUMNS < product->columns)
                    compute_panel(*product, panel * COLUMNS, ahead * COLUMNS, top, height, room,
                                  sums, is_one_block);
            }
        }
    }
}

void add_transposed_product(const BFloat16* left, long left_row, const BFloat16* right,
                            long right_row, float* total, long total_row, long depth, long height,
                            long width, int threads) {
    long panels = ceil_div(width, COLUMNS), tiles = ceil_div(height, ROWS);
    long stripes = std::min(tiles, ceil_div(ceil_div(tiles, STRIPE_TILES), threads) * threads);
    long deepest = ceil_div(std::min(DEPTH, depth), 2) * 2;
    BFloat16* packed = all_panels.room<BFloat16>(panels * COLUMNS * deepest);
#pragma omp parallel num_threads(threads)
    {
        BFloat16* stripe = own_stripe.room<BFloat16>(ceil_div(tiles, stripes) * ROWS * deepest);
        float edge[ROWS * COLUMNS];
        for (long k = 0; k < depth; k += DEPTH) {
            long now = std::min(DEPTH, depth - k), words = ceil_div(now, 2);
            long panel_size = 2 * words * COLUMNS, rows_size = 2 * words * ROWS;
#pragma omp for schedule(static)
            for (long p = 0; p < panels; p++)
                pack_rows(right + k * right_row + p * COLUMNS, right_row, now,
                          width - p * COLUMNS, COLUMNS, packed + p * panel_size);
#pragma omp for schedule(static)
            for (long s = 0; s < stripes; s++) {
                long first = s * tiles / stripes, last = (s + 1) * tiles / stripes;
                for (long j = 0; j < now; j += STEP)
                    for (long i = first; i < last; i++)
                        pack_rows(left + (k + j) * left_row + i * ROWS, left_row,
                                  std::min(STEP, now - j), height - i * ROWS, ROWS,
                                  stripe + (i - first) * rows_size + j * ROWS);
                for (long p = 0; p < panels; p++)
                    for (long i = first; i < last; i++) {
                        long rows = std::min(ROWS, height - i * ROWS);
                        long columns = std::min(COLUMNS, width - p * COLUMNS);
                        float* to = total + i * ROWS * total_row + p * COLUMNS;
                        bool is_whole = columns == COLUMNS;
                        TILES[rows](stripe + (i - first) * rows_size, 2, 2 * ROWS,
                                    packed + p * panel_size, words, is_whole ? to : edge,
                                    is_whole ? total_row : COLUMNS, is_whole);
                        for (long r = 0; r < rows && !is_whole; r++)
                            for (long c = 0; c < columns; c++)
                                to[r * total_row + c] += edge[r * COLUMNS + c];
                    }
            }
        }
    }
}

// All panels of [columns, depth].
void pack_panels(const BFloat16* from, long from_row, long columns, long depth, BFloat16* to,
                 int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long column = 0; column < columns; column += COLUMNS)
        pack_columns(from + column * from_row, from_row, depth, columns - column,
                     to + column * depth);
}
}
#endif
