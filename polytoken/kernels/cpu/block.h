/* A llama-type decoder block as two calls, before and after the rows of its cache are written, and attention alone.
 *
 * Every row of the result depends on that row, its position, its keys and its values alone: not on how many rows come
 * together, and not on keys that it does not see. The products are those of products.h; the rest is in rows.inc.
 */
#ifndef POLYTOKEN_BLOCK_H
#define POLYTOKEN_BLOCK_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Row-major weights as the checkpoint holds them; biases and head norms may be NULL. `qkv` holds the rows of query, key
 * and value behind one another, `gate_up` those of gate and up. */
typedef struct {
    ptrdiff_t hidden, inner, heads, kv_heads, width;
    float eps, head_eps, scale;
    const float *first_norm, *second_norm, *q_norm, *k_norm;
    const float *qkv, *qkv_bias, *out, *out_bias;
    const float *gate_up, *gate_up_bias, *down, *down_bias;
} block_weights;

/* Keys or values [kv_heads, P, D]: rows of D floats behind one another, heads `head_stride` floats apart. */
typedef struct {
    const float *data;
    ptrdiff_t head_stride;
} block_past;

/* Attention heads of `width` D each; heads / kv_heads queries share keys and values. */
typedef struct {
    ptrdiff_t heads, kv_heads, width;
} block_heads;

/* How much of the P keys each of the S rows sees: all; all but the later of the S last ones; or what [S, P] says. */
enum { BLOCK_SEES_ALL, BLOCK_SEES_CAUSALLY, BLOCK_SEES_MASKED };

typedef struct {
    const char *symbols; /* BLOCK_CALLS: both sides must mean the same structure */
    /* x [S, H] to queries [kv_heads, S, heads / kv_heads, D], normed, turned and scaled; keys and values
     * [kv_heads, S, D]. Tables [S, D] as row_rotate wants them. Returns 0 when memory is out. */
    int (*enter)(const block_weights *, ptrdiff_t rows, const float *x, const float *cosines, const float *sines,
                 float *queries, float *keys, float *values);
    /* x [S, H], its queries, and all P keys and values to y [S, H]. Returns 0 when memory is out. */
    int (*leave)(const block_weights *, ptrdiff_t rows, ptrdiff_t total, const float *x, const float *queries,
                 block_past keys, block_past values, int sees, const unsigned char *mask, float *y);
    /* Queries [heads, S, D] times `scale` over all P keys and values, to y [S, heads, D]. Returns 0 when memory is out.
     */
    int (*attend)(const block_heads *, float scale, ptrdiff_t rows, ptrdiff_t total, const float *queries,
                  block_past keys, block_past values, int sees, const unsigned char *mask, float *y);
    /* y = norm of x [S, n]. */
    void (*norm)(const float *x, const float *weight, float eps, ptrdiff_t rows, ptrdiff_t n, float *y);
} block_calls;

/* Name of the capsule, and of this layout of the structures above: a new one whenever they change. */
#define BLOCK_CAPSULE "polytoken.kernels._products.blocks"
#define BLOCK_CALLS "blocks 2"

extern const block_calls blocks;

#ifdef __cplusplus
}
#endif
#endif
