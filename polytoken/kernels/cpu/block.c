/* A llama-type block over the exact products and the row operations of the form in use. */
#include "block.h"

#include <string.h>

#include "products.h"

enum { ROW_MAJOR = 101, NO_TRANS = 111, TRANS = 112 };

/* Rows of scores computed together, queries of all heads of a group counted. */
enum { SCORE_ROWS = 96 };

/* y [rows, n] = x [rows, k] * w[n, k]^T + bias */
static void project(const float *x, ptrdiff_t rows, ptrdiff_t k, const float *w, const float *bias, ptrdiff_t n,
                    float *y)
{
    exact_cblas_sgemm(ROW_MAJOR, NO_TRANS, TRANS, (int)rows, (int)n, (int)k, 1, x, (int)k, w, (int)k, 0, y, (int)n);
    for (ptrdiff_t i = 0; bias && i < rows; i++)
        for (ptrdiff_t j = 0; j < n; j++)
            y[i * n + j] += bias[j];
}

static void norm_rows(const float *x, const float *weight, float eps, ptrdiff_t rows, ptrdiff_t n, float *y)
{
    const form *f = forms_current();
    for (ptrdiff_t i = 0; i < rows; i++)
        f->norm(x + i * n, weight, eps, n, y + i * n);
}

static void add_rows(const float *x, ptrdiff_t count, float *y)
{
    for (ptrdiff_t i = 0; i < count; i++)
        y[i] = x[i] + y[i];
}

static int enter(const block_weights *w, ptrdiff_t rows, const float *x, const float *cosines, const float *sines,
                 float *queries, float *keys, float *values)
{
    const form *f = forms_current();
    const ptrdiff_t width = w->width, group = w->heads / w->kv_heads, all = (w->heads + 2 * w->kv_heads) * width;
    float *normed = scratch(SCRATCH_BLOCK, sizeof(float) * (size_t)(rows * (w->hidden + all)));
    if (!normed)
        return 0;
    float *qkv = normed + rows * w->hidden;
    norm_rows(x, w->first_norm, w->eps, rows, w->hidden, normed);
    project(normed, rows, w->hidden, w->qkv, w->qkv_bias, all, qkv);
    for (ptrdiff_t s = 0; s < rows; s++) {
        const float *c = cosines + s * width, *n = sines + s * width;
        for (ptrdiff_t h = 0; h < w->heads + w->kv_heads; h++) {
            float *head = qkv + s * all + h * width;
            const int is_key = h >= w->heads;
            const float *weight = is_key ? w->k_norm : w->q_norm;
            if (weight)
                f->norm(head, weight, w->head_eps, width, head);
            if (is_key)
                f->rotate(head, c, n, 1, width, keys + ((h - w->heads) * rows + s) * width);
            else
                f->rotate(head, c, n, w->scale, width,
                          queries + ((h / group * rows + s) * group + h % group) * width);
        }
        const float *value = qkv + s * all + (w->heads + w->kv_heads) * width;
        for (ptrdiff_t h = 0; h < w->kv_heads; h++)
            memcpy(values + (h * rows + s) * width, value + h * width, sizeof(float) * (size_t)width);
    }
    return 1;
}

/* Attention of the rows [from, to) of one group of heads; `scores` and `sums` are buffers. */
static void attend_group(const block_heads *n, ptrdiff_t rows, ptrdiff_t total, ptrdiff_t from, ptrdiff_t to,
                         ptrdiff_t h, const float *queries, block_past keys, block_past values, int sees,
                         const unsigned char *mask, float *scores, float *sums, float *mixed, float *attended)
{
    const form *f = forms_current();
    const ptrdiff_t width = n->width, group = n->heads / n->kv_heads, count = (to - from) * group;
    const ptrdiff_t past = total - rows, most = sees == BLOCK_SEES_CAUSALLY ? past + to : total;
    exact_cblas_sgemm(ROW_MAJOR, NO_TRANS, TRANS, (int)count, (int)most, (int)width, 1,
                      queries + (h * rows + from) * group * width, (int)width, keys.data + h * keys.head_stride,
                      (int)width, 0, scores, (int)most);
    for (ptrdiff_t i = 0; i < count; i++) {
        const ptrdiff_t s = from + i / group;
        f->weigh(scores + i * most, sees == BLOCK_SEES_MASKED ? mask + s * total : NULL,
                 sees == BLOCK_SEES_CAUSALLY ? past + s + 1 : most, most);
    }
    f->sums(scores, most, count, most, sums);
    exact_cblas_sgemm(ROW_MAJOR, NO_TRANS, NO_TRANS, (int)count, (int)width, (int)most, 1, scores, (int)most,
                      values.data + h * values.head_stride, (int)width, 0, mixed, (int)width);
    for (ptrdiff_t i = 0; i < count; i++) {
        float *to_row = attended + ((from + i / group) * n->heads + h * group + i % group) * width;
        const float *row = mixed + i * width, scale = 1 / sums[i];
        for (ptrdiff_t d = 0; d < width; d++)
            to_row[d] = row[d] * scale;
    }
}

/* Queries [kv_heads, S, heads / kv_heads, D], scaled, over all P keys and values, to [S, heads, D]. */
static int attend_scaled(const block_heads *n, ptrdiff_t rows, ptrdiff_t total, const float *queries, block_past keys,
                         block_past values, int sees, const unsigned char *mask, float *attended)
{
    const ptrdiff_t group = n->heads / n->kv_heads;
    ptrdiff_t step = SCORE_ROWS / group;
    step = step < 1 ? 1 : step > rows ? rows : step;
    float *scores = scratch(SCRATCH_SCORES, sizeof(float) * (size_t)(step * group * (total + 1 + n->width)));
    if (!scores)
        return 0;
    float *sums = scores + step * group * total, *mixed = sums + step * group;
    for (ptrdiff_t from = 0; from < rows; from += step)
        for (ptrdiff_t h = 0; h < n->kv_heads; h++)
            attend_group(n, rows, total, from, from + step < rows ? from + step : rows, h, queries, keys, values, sees,
                         mask, scores, sums, mixed, attended);
    return 1;
}

static int attend(const block_heads *n, float scale, ptrdiff_t rows, ptrdiff_t total, const float *queries,
                  block_past keys, block_past values, int sees, const unsigned char *mask, float *y)
{
    const ptrdiff_t width = n->width, group = n->heads / n->kv_heads;
    float *scaled = scratch(SCRATCH_BLOCK, sizeof(float) * (size_t)(rows * n->heads * width));
    if (!scaled)
        return 0;
    for (ptrdiff_t h = 0; h < n->heads; h++)
        for (ptrdiff_t s = 0; s < rows; s++) {
            const float *from = queries + (h * rows + s) * width;
            float *to = scaled + ((h / group * rows + s) * group + h % group) * width;
            for (ptrdiff_t d = 0; d < width; d++)
                to[d] = from[d] * scale;
        }
    return attend_scaled(n, rows, total, scaled, keys, values, sees, mask, y);
}

static int leave(const block_weights *w, ptrdiff_t rows, ptrdiff_t total, const float *x, const float *queries,
                 block_past keys, block_past values, int sees, const unsigned char *mask, float *y)
{
    const form *f = forms_current();
    const block_heads n = {w->heads, w->kv_heads, w->width};
    const ptrdiff_t heads = w->heads * w->width, wide = heads > w->hidden ? heads : w->hidden;
    float *attended = scratch(SCRATCH_BLOCK, sizeof(float) * (size_t)(rows * (wide + 2 * w->inner)));
    if (!attended || !attend_scaled(&n, rows, total, queries, keys, values, sees, mask, attended))
        return 0;
    project(attended, rows, heads, w->out, w->out_bias, w->hidden, y);
    add_rows(x, rows * w->hidden, y);
    float *normed = attended, *both = attended + rows * wide;
    norm_rows(y, w->second_norm, w->eps, rows, w->hidden, normed);
    project(normed, rows, w->hidden, w->gate_up, w->gate_up_bias, 2 * w->inner, both);
    /* activations move up: row s to s * inner, which no later row still needs */
    for (ptrdiff_t s = 0; s < rows; s++)
        f->swiglu(both + 2 * s * w->inner, both + (2 * s + 1) * w->inner, w->inner, both + s * w->inner);
    project(both, rows, w->inner, w->down, w->down_bias, w->hidden, normed);
    for (ptrdiff_t i = 0; i < rows * w->hidden; i++)
        y[i] += normed[i];
    return 1;
}

const block_calls blocks = {BLOCK_CALLS, enter, leave, attend, norm_rows};
