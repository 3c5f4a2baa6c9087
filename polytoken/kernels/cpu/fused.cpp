// Decoder blocks as MLX operations: `polytoken.kernels._fused`.
//
// Two operations stand for a block, before and after its cache grows, where MLX's own would be some thirty; another is
// attention alone, for blocks of other kinds. What they compute is in block.c; here is only what MLX and Python need to
// see of it.
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include "mlx/array.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"
#include "mlx/utils.h"
#include "mlx/version.h"

#include "block.h"

namespace nb = nanobind;
namespace mx = mlx::core;

namespace {

const block_calls *calls;

void expect(bool holds, const char *what)
{
    if (!holds)
        throw std::invalid_argument(what);
}

const float *floats(const mx::array &a) { return a.data<float>(); }

const float *floats(const std::optional<mx::array> &a) { return a ? a->data<float>() : nullptr; }

void expect_weight(const mx::array &a, std::initializer_list<int> shape, const char *name)
{
    const bool fits = a.dtype() == mx::float32 && a.shape() == mx::Shape(shape) && a.is_available() &&
                      a.flags().row_contiguous;
    if (!fits)
        throw std::invalid_argument(std::string(name) + " must be an evaluated contiguous float32 array of its shape");
}

void expect_weight(const std::optional<mx::array> &a, std::initializer_list<int> shape, const char *name)
{
    if (a)
        expect_weight(*a, shape, name);
}

void make_room(mx::array &out) { out.set_data(mx::allocator::malloc(out.nbytes())); }

// A task cannot report an error to whoever waits for its result, but a result that is no number is refused there.
void fail_as_nan(float *out, std::size_t count)
{
    for (std::size_t i = 0; i < count; i++)
        out[i] = std::numeric_limits<float>::quiet_NaN();
}

// The weights of a block and the arrays that keep them alive.
struct Weights {
    mx::array first_norm, second_norm, qkv, out, gate_up, down;
    std::optional<mx::array> q_norm, k_norm, qkv_bias, out_bias, gate_up_bias, down_bias;
    block_weights raw{};

    Weights(int heads, int kv_heads, int width, float eps, float head_eps, float scale, mx::array first, mx::array second,
            mx::array qkv_, mx::array out_, mx::array gate_up_, mx::array down_, std::optional<mx::array> q,
            std::optional<mx::array> k, std::optional<mx::array> b_qkv, std::optional<mx::array> b_out,
            std::optional<mx::array> b_gate_up, std::optional<mx::array> b_down)
        : first_norm(std::move(first)), second_norm(std::move(second)), qkv(std::move(qkv_)), out(std::move(out_)),
          gate_up(std::move(gate_up_)), down(std::move(down_)), q_norm(std::move(q)), k_norm(std::move(k)),
          qkv_bias(std::move(b_qkv)), out_bias(std::move(b_out)), gate_up_bias(std::move(b_gate_up)),
          down_bias(std::move(b_down))
    {
        expect(kv_heads > 0 && heads % kv_heads == 0, "heads must be a multiple of kv_heads");
        expect(width > 0 && width % 2 == 0, "width must be even");
        expect(gate_up.ndim() == 2 && down.ndim() == 2, "gate_up and down must be matrices");
        const int hidden = gate_up.shape(1), inner = down.shape(1), all = (heads + 2 * kv_heads) * width;
        expect_weight(first_norm, {hidden}, "first_norm");
        expect_weight(second_norm, {hidden}, "second_norm");
        expect_weight(qkv, {all, hidden}, "qkv");
        expect_weight(out, {hidden, heads * width}, "out");
        expect_weight(gate_up, {2 * inner, hidden}, "gate_up");
        expect_weight(down, {hidden, inner}, "down");
        expect_weight(q_norm, {width}, "q_norm");
        expect_weight(k_norm, {width}, "k_norm");
        expect_weight(qkv_bias, {all}, "qkv_bias");
        expect_weight(out_bias, {hidden}, "out_bias");
        expect_weight(gate_up_bias, {2 * inner}, "gate_up_bias");
        expect_weight(down_bias, {hidden}, "down_bias");
        raw = {hidden,          inner,           heads,           kv_heads,
               width,           eps,             head_eps,        scale,
               floats(first_norm), floats(second_norm), floats(q_norm), floats(k_norm),
               floats(qkv),     floats(qkv_bias), floats(out),    floats(out_bias),
               floats(gate_up), floats(gate_up_bias), floats(down), floats(down_bias)};
    }
};

using Held = std::shared_ptr<const Weights>;

class CpuPrimitive : public mx::Primitive {
public:
    using mx::Primitive::Primitive;
    void eval_gpu(const std::vector<mx::array> &, std::vector<mx::array> &) override
    {
        throw std::runtime_error("a fused block runs on the CPU only");
    }
};

void expect_rows(const mx::array &a, const char *what)
{
    if (!a.flags().row_contiguous)
        throw std::runtime_error(std::string(what) + " must be contiguous");
}

// Keys or values as block.c wants them.
block_past past(const mx::array &a)
{
    const auto &strides = a.strides();
    const bool rows_follow = (a.shape(3) == 1 || strides[3] == 1) && (a.shape(2) == 1 || strides[2] == a.shape(3));
    if (!rows_follow)
        throw std::runtime_error("rows of keys and values must follow one another");
    return {floats(a), static_cast<std::ptrdiff_t>(strides[1])};
}

const unsigned char *mask_of(int sees, const mx::array &last)
{
    if (sees != BLOCK_SEES_MASKED)
        return nullptr;
    expect_rows(last, "mask");
    return reinterpret_cast<const unsigned char *>(last.data<bool>());
}

class Enter : public CpuPrimitive {
public:
    Enter(mx::Stream stream, Held weights) : CpuPrimitive(stream), weights_(std::move(weights)) {}
    const char *name() const override { return "BlockEnter"; }

    void eval_cpu(const std::vector<mx::array> &in, std::vector<mx::array> &out) override
    {
        for (const auto &a : in)
            expect_rows(a, "rows and tables of a block");
        for (auto &a : out)
            make_room(a);
        mx::cpu::get_command_encoder(stream()).dispatch(
            [w = weights_, rows = in[0].shape(0), x = floats(in[0]), c = floats(in[1]), s = floats(in[2]),
             q = out[0].data<float>(), k = out[1].data<float>(), v = out[2].data<float>(), size = out[0].size()] {
                if (!calls->enter(&w->raw, rows, x, c, s, q, k, v))
                    fail_as_nan(q, size);
            });
    }

private:
    Held weights_;
};

class Leave : public CpuPrimitive {
public:
    Leave(mx::Stream stream, Held weights, int sees)
        : CpuPrimitive(stream), weights_(std::move(weights)), sees_(sees) {}
    const char *name() const override { return "BlockLeave"; }

    void eval_cpu(const std::vector<mx::array> &in, std::vector<mx::array> &out) override
    {
        expect_rows(in[0], "rows of a block");
        expect_rows(in[1], "queries of a block");
        make_room(out[0]);
        mx::cpu::get_command_encoder(stream()).dispatch(
            [w = weights_, sees = sees_, rows = in[0].shape(0), total = in[2].shape(2), x = floats(in[0]),
             q = floats(in[1]), k = past(in[2]), v = past(in[3]), size = out[0].size(), y = out[0].data<float>(),
             mask = mask_of(sees_, in.back())] {
                if (!calls->leave(&w->raw, rows, total, x, q, k, v, sees, mask, y))
                    fail_as_nan(y, size);
            });
    }

private:
    Held weights_;
    int sees_;
};

class Attend : public CpuPrimitive {
public:
    Attend(mx::Stream stream, block_heads heads, float scale, int sees)
        : CpuPrimitive(stream), heads_(heads), scale_(scale), sees_(sees) {}
    const char *name() const override { return "RowAttention"; }

    void eval_cpu(const std::vector<mx::array> &in, std::vector<mx::array> &out) override
    {
        expect_rows(in[0], "queries");
        make_room(out[0]);
        mx::cpu::get_command_encoder(stream()).dispatch(
            [n = heads_, scale = scale_, sees = sees_, rows = in[0].shape(2), total = in[1].shape(2), q = floats(in[0]),
             k = past(in[1]), v = past(in[2]), size = out[0].size(), y = out[0].data<float>(),
             mask = mask_of(sees_, in.back())] {
                if (!calls->attend(&n, scale, rows, total, q, k, v, sees, mask, y))
                    fail_as_nan(y, size);
            });
    }

private:
    block_heads heads_;
    float scale_;
    int sees_;
};

class Norm : public CpuPrimitive {
public:
    Norm(mx::Stream stream, float eps) : CpuPrimitive(stream), eps_(eps) {}
    const char *name() const override { return "RowNorm"; }

    void eval_cpu(const std::vector<mx::array> &in, std::vector<mx::array> &out) override
    {
        expect_rows(in[0], "rows of a norm");
        expect_rows(in[1], "weight of a norm");
        make_room(out[0]);
        mx::cpu::get_command_encoder(stream()).dispatch(
            [eps = eps_, rows = in[0].shape(0), n = in[0].shape(1), x = floats(in[0]), w = floats(in[1]),
             y = out[0].data<float>()] { calls->norm(x, w, eps, rows, n, y); });
    }

private:
    float eps_;
};

mx::Stream here() { return mx::default_stream(mx::Device::cpu); }

void expect_floats(const mx::array &a, std::initializer_list<int> shape, const char *what)
{
    expect(a.dtype() == mx::float32 && a.shape() == mx::Shape(shape), what);
}

// What rows see, as block.c counts it; a mask becomes the last input.
int add_mask(std::vector<mx::array> &inputs, int rows, int total, bool causal, const std::optional<mx::array> &mask)
{
    expect(!causal || total >= rows, "causal rows must be among the keys");
    if (!mask)
        return causal ? BLOCK_SEES_CAUSALLY : BLOCK_SEES_ALL;
    expect(mask->dtype() == mx::bool_ && mask->shape() == mx::Shape({rows, total}), "mask must be bool [S, P]");
    inputs.push_back(mx::contiguous(*mask));
    return BLOCK_SEES_MASKED;
}

nb::object enter(const Held &w, const mx::array &x, const mx::array &cosines, const mx::array &sines)
{
    expect(x.ndim() == 2, "x must be [S, H]");
    const int rows = x.shape(0), heads = w->raw.heads, kv_heads = w->raw.kv_heads, width = w->raw.width;
    expect_floats(x, {rows, static_cast<int>(w->raw.hidden)}, "x must be float32 [S, H]");
    expect_floats(cosines, {rows, width}, "cosines must be float32 [S, D]");
    expect_floats(sines, {rows, width}, "sines must be float32 [S, D]");
    auto made = mx::array::make_arrays(
        {{kv_heads, rows, heads / kv_heads, width}, {1, kv_heads, rows, width}, {1, kv_heads, rows, width}},
        {mx::float32, mx::float32, mx::float32}, std::make_shared<Enter>(here(), w), {x, cosines, sines});
    return nb::make_tuple(made[0], made[1], made[2]);
}

mx::array leave(const Held &w, const mx::array &x, const mx::array &queries, const mx::array &keys,
                const mx::array &values, bool causal, const std::optional<mx::array> &mask)
{
    expect(x.ndim() == 2 && keys.ndim() == 4, "x must be [S, H], keys [1, h, P, D]");
    const int rows = x.shape(0), heads = w->raw.heads, kv_heads = w->raw.kv_heads, width = w->raw.width;
    const int total = keys.shape(2);
    expect_floats(x, {rows, static_cast<int>(w->raw.hidden)}, "x must be float32 [S, H]");
    expect_floats(queries, {kv_heads, rows, heads / kv_heads, width}, "queries must be those of enter");
    expect_floats(keys, {1, kv_heads, total, width}, "keys must be float32 [1, h, P, D]");
    expect_floats(values, {1, kv_heads, total, width}, "values must be float32 [1, h, P, D]");
    std::vector<mx::array> inputs = {x, queries, keys, values};
    const int sees = add_mask(inputs, rows, total, causal, mask);
    return mx::array(x.shape(), mx::float32, std::make_shared<Leave>(here(), w, sees), std::move(inputs));
}

mx::array attend(const mx::array &queries, const mx::array &keys, const mx::array &values, float scale, bool causal,
                 const std::optional<mx::array> &mask)
{
    expect(queries.ndim() == 4 && keys.ndim() == 4, "queries must be [1, H, S, D], keys [1, h, P, D]");
    const int heads = queries.shape(1), rows = queries.shape(2), width = queries.shape(3);
    const int kv_heads = keys.shape(1), total = keys.shape(2);
    expect(kv_heads > 0 && heads % kv_heads == 0, "heads must be a multiple of kv_heads");
    expect_floats(queries, {1, heads, rows, width}, "queries must be float32 [1, H, S, D]");
    expect_floats(keys, {1, kv_heads, total, width}, "keys must be float32 [1, h, P, D]");
    expect_floats(values, {1, kv_heads, total, width}, "values must be float32 [1, h, P, D]");
    std::vector<mx::array> inputs = {mx::contiguous(queries), keys, values};
    const int sees = add_mask(inputs, rows, total, causal, mask);
    auto op = std::make_shared<Attend>(here(), block_heads{heads, kv_heads, width}, scale, sees);
    return mx::array({1, rows, heads * width}, mx::float32, std::move(op), std::move(inputs));
}

mx::array norm(const mx::array &x, const mx::array &weight, float eps)
{
    expect(x.ndim() == 2 && x.dtype() == mx::float32, "x must be float32 [S, n]");
    expect_floats(weight, {x.shape(1)}, "weight must be float32 [n]");
    return mx::array(x.shape(), mx::float32, std::make_shared<Norm>(here(), eps), {x, weight});
}

struct Block {
    Held held;
};

}  // namespace

NB_MODULE(_fused, m)
{
    m.attr("built_for") = std::to_string(MLX_VERSION_MAJOR) + "." + std::to_string(MLX_VERSION_MINOR) + "." +
                          std::to_string(MLX_VERSION_PATCH);
    m.attr("running") = std::string(mx::version());
    calls = static_cast<const block_calls *>(PyCapsule_Import(BLOCK_CAPSULE, 0));
    if (!calls)
        throw nb::python_error();
    if (std::string(calls->symbols) != BLOCK_CALLS)
        throw nb::import_error("_fused and _products were built from different sources");
    nb::class_<Block>(m, "Block")
        .def(
            "__init__",
            [](Block *self, int heads, int kv_heads, int width, float eps, float head_eps, float scale,
               const mx::array &first_norm, const mx::array &second_norm, const mx::array &qkv, const mx::array &out,
               const mx::array &gate_up, const mx::array &down, const std::optional<mx::array> &q_norm,
               const std::optional<mx::array> &k_norm, const std::optional<mx::array> &qkv_bias,
               const std::optional<mx::array> &out_bias, const std::optional<mx::array> &gate_up_bias,
               const std::optional<mx::array> &down_bias) {
                new (self) Block{std::make_shared<Weights>(heads, kv_heads, width, eps, head_eps, scale, first_norm,
                                                           second_norm, qkv, out, gate_up, down, q_norm, k_norm,
                                                           qkv_bias, out_bias, gate_up_bias, down_bias)};
            },
            nb::kw_only(), nb::arg("heads"), nb::arg("kv_heads"), nb::arg("width"), nb::arg("eps"),
            nb::arg("head_eps"), nb::arg("scale"), nb::arg("first_norm"), nb::arg("second_norm"), nb::arg("qkv"),
            nb::arg("out"), nb::arg("gate_up"), nb::arg("down"), nb::arg("q_norm").none() = nb::none(),
            nb::arg("k_norm").none() = nb::none(), nb::arg("qkv_bias").none() = nb::none(),
            nb::arg("out_bias").none() = nb::none(), nb::arg("gate_up_bias").none() = nb::none(),
            nb::arg("down_bias").none() = nb::none(), "The evaluated float32 weights of one block.")
        .def(
            "enter",
            [](const Block &b, const mx::array &x, const mx::array &c, const mx::array &s) {
                return enter(b.held, x, c, s);
            },
            nb::arg("x"), nb::arg("cosines"), nb::arg("sines"),
            "x [S, H] and tables [S, D] -> queries for leave, keys and values [1, h, S, D]")
        .def(
            "leave",
            [](const Block &b, const mx::array &x, const mx::array &q, const mx::array &k, const mx::array &v,
               bool causal, const std::optional<mx::array> &mask) { return leave(b.held, x, q, k, v, causal, mask); },
            nb::arg("x"), nb::arg("queries"), nb::arg("keys"), nb::arg("values"), nb::arg("causal") = false,
            nb::arg("mask").none() = nb::none(), "x and all P keys and values [1, h, P, D] -> the block's result [S, H]");
    m.def("attend", &attend, nb::arg("queries"), nb::arg("keys"), nb::arg("values"), nb::arg("scale"),
          nb::arg("causal") = false, nb::arg("mask").none() = nb::none(),
          "queries [1, H, S, D] over all P keys and values [1, h, P, D] -> [1, S, H D]");
    m.def("norm", &norm, nb::arg("x"), nb::arg("weight"), nb::arg("eps"), "root mean square norm of x [S, n]");
}
