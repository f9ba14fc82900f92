// A model as Python describes it: flat structs of numbers and addresses (library.py has the same). Nothing here owns memory.
#pragma once

#include <cstdint>

namespace furrow {

// Kinds of weights. From Q4_0_BLOCKS on they are kept in the blocks of a file: see blocks/format.h.
enum Kind : int32_t {
  FLOAT32,
  BFLOAT16,
  FLOAT16,
  INT8,
  Q4_0_BLOCKS,
  Q4_1_BLOCKS,
  Q5_0_BLOCKS,
  Q5_1_BLOCKS,
  Q8_0_BLOCKS,
  Q2_K_BLOCKS,
  Q3_K_BLOCKS,
  Q4_K_BLOCKS,
  Q5_K_BLOCKS,
  Q6_K_BLOCKS,
  MXFP4_BLOCKS,
  IQ4_NL_BLOCKS,
  IQ4_XS_BLOCKS,
  IQ3_S_BLOCKS,
  TQ2_0_BLOCKS,
  E4M3_GROUPS,  // see blocks/groups.h
  INT4_GROUPS,
  E2M1_GROUPS,
};

// The kinds that this library has, by bit. Each costs time to compile, and a model has few of them.
#ifndef FURROW_KINDS
#define FURROW_KINDS 0xffffffff
#endif
constexpr bool included(Kind kind) { return FURROW_KINDS >> kind & 1; }

// Of a feed-forward network.
enum Activation : int32_t { SILU, GELU_TANH, CLAMPED_SWIGLU, RELU_SQUARED, XIELU };

// The product of gate and up: activation(gate) · up, or where there is but one projection, activation(up). CLAMPED_SWIGLU, of gpt_oss,
// is g / (1 + e^(-slope · g)) · (u + 1), with g at most `limit` and u within ± limit. RELU_SQUARED is max(0, u)², of one projection. XIELU (https://arxiv.org/abs/2411.13010), too, is
// positive · u² + linear · u above 0, and negative · (e^min(u, least) - 1 - u) + linear · u below.
struct Gate {
  Activation activation;
  float slope, limit;  // of CLAMPED_SWIGLU
  int32_t alone;       // 1: there is but one projection
  float positive, negative, linear, least;  // of XIELU
  float scale;  // of the gate, before its activation
};

// Outputs [first, first + outputs) of a linear layer, with weights of one kind.
struct Matrix {
  const void* weights;  // packed: see product.h
  const float* scales;  // INT8: by output, the value of one unit of its integer sums. Groups: see blocks/groups.h
  const int32_t* sums;  // INT8: by output, what OFFSET (simd.h) adds to its integer sums
  int64_t first, outputs;
  Kind kind;
  const uint8_t* zeros;  // groups of INT4; of E2M1 the scales, as exponents of two
  int64_t group;         // inputs that share a scale; INT8: 0, or where codes and scales are those of a checkpoint, all inputs
};

constexpr int MOST_MATRICES = 4;  // query, key, value and gates of heads

// y = x · Wᵀ + b, or without the bias where it is null. W is `count` matrices, one below the other: layers that share their input
// are one product, and the tensors of a file may be of several kinds.
struct Linear {
  Matrix matrices[MOST_MATRICES];
  const float* bias;  // readable for PANEL outputs beyond the last
  int64_t inputs, outputs;
  int32_t count;
};

// An RMS norm, or where `centered`, a layer norm: the mean is subtracted before.
struct Norm {
  const float* weight;  // null: none
  float epsilon;
  int32_t centered;
  const float* bias;  // of a layer norm; null: none
};

// Rotary embeddings of one kind of layer: frequencies of pairs that lie half of the turned part apart.
struct Rotary {
  const float* frequencies;  // dim / 2
  float scale;               // of sines and cosines
  int64_t dim;               // numbers of a head that are turned, from its first on
  int32_t neighbours;        // 1: the numbers of a pair lie next to each other instead
  float growth;              // queries are multiplied by 1 + growth · log(1 + ⌊position / period⌋); 0: they are not
  float period;
  float offset;              // added to positions for the growth
};

// The numbers that a norm of queries or keys takes together: a head, a head that was turned already, or all heads.
enum HeadNorms : int32_t { EACH_HEAD, EACH_TURNED_HEAD, ALL_HEADS };

// What a layer's product has behind its queries. Without keys it attends to those that an earlier layer stored. Values that are
// its keys are so before these are normed and turned.
enum KeysAndValues : int32_t { BOTH, KEYS_ALONE, NEITHER };

// A gated feed-forward network of a mixture.
struct Expert {
  Linear gate_up, down;
};

// Several feed-forward networks, of which each token goes through some.
struct Mixture {
  Linear router;          // outputs: `count`, and behind them, where `shared_gate`, the gate of the shared expert
  const Expert* experts;  // `count`, and behind them, where `shared`, that one
  int64_t count, chosen;  // experts, and how many of them a token goes to
  int32_t sigmoid;        // 1: an expert's score is the sigmoid of its output; 0: its share of all
  const float* correction;       // by expert, added to its score for the choice alone; null: none
  int64_t groups, chosen_groups;  // experts lie in groups of one size; only those of the chosen groups, by their two best experts, are chosen
  int32_t normalized;     // 1: the weights of the chosen ones are divided by their sum; 0: they are the scores
  float least_sum;        // added to that sum
  int32_t sparse_mixer;   // 1: a chosen expert's weight is its share among those that are left with an output within 2 · jitter of its own
  float jitter;
  float scale;            // of the weights of the chosen ones
  const float* expert_scales;  // by expert, of its weight; null: none
  int32_t shared;         // 1: one more expert that every token goes to
  int32_t shared_gate;    // 1: the shared expert is weighted by the sigmoid of its gate; 0: by 1
  int32_t weighted_inputs;  // 1: an expert's input is multiplied by its weight, and not its output
  Norm before_router, before, after;  // of a mixture beside a network (see Layer): of the hidden rows for the router and for experts; of the output
};

// The part of a token's row that belongs to key head `head`: `step` numbers from head to head.
struct Place {
  int64_t first, step;

  int64_t of(int64_t head) const { return first + head * step; }
};

// Kinds of recurrent layers, each with a file in recurrent/. A SHORT_CONVOLUTION has no key heads, and its channels are one value head.
enum RecurrentKind : int32_t { DELTA_RULE, SHORT_CONVOLUTION, MAMBA };

// A recurrent layer. The value heads of a key head lie side by side, in a row as in the state, or `tiled`: value head h belongs to key
// head h mod key_heads.
struct RecurrentLayer {
  Linear projections;              // outputs: queries, keys, values and gates, which `query` … `gate` find
  Linear rates;                    // of DELTA_RULE; outputs: two numbers for each value head, which `learning` and `keeping` find
  Place query, key, value, gate, learning, keeping;
  const float* filter_bias;        // by channel; null: none
  const float* filter;             // of the convolution: (taps, channels), the newest input last; channels: queries, keys, values; of MAMBA x, B, C
  const float *decay, *decay_bias;  // by value head
  const float* skip;               // of MAMBA, by value head
  Norm norm;                       // of a head's output; of MAMBA, that of all heads of a key head
  int64_t key_heads, value_heads, key_dim, value_dim, taps;
  int64_t state;                   // floats from the begin of a sequence's state to this layer's: see recurrent/pass.h
  RecurrentKind kind;
  int32_t tiled;
  int64_t norm_groups, first_group;  // of MAMBA: groups whose squares are summed, and the first of this rank's among them
  int64_t norm_width;                // of MAMBA: numbers of a group on all of its ranks
  int32_t gate_last;                 // of MAMBA, 1: outputs are normed before they are multiplied by the gate
  const float* output_scales;        // by output of `projections`; null: none
  Linear out;                        // of a layer that attends as well: beside the layer's `attention_out`
  float out_scale;                   // of its outputs
};

// The projections of attention over compressed keys and values: see latent.h.
struct Latent {
  Linear down;     // outputs: `query_rank` for queries, `rank` for keys and values, and the `turned` part of keys
  Linear queries;  // of the first of these, normed, or without a rank of the layer's input; outputs by head: `plain`, then `turned`
  Norm query, shared;
  const Linear *keys, *values;  // by head: plain → rank, rank → value_dim
  int64_t query_rank, rank, turned, plain, value_dim;
};

// A layer's part of alternating updates (AltUp, https://arxiv.org/abs/2301.13310): the hidden rows are several streams. The layer
// predicts all of them from all, computes one, the active one, and corrects all by what it made of that. Coefficients are linear in
// the outputs of a router, tanh(router · norm(active row)). Beside attention lies a residual of low rank (LAuReL,
// https://arxiv.org/abs/2411.07501) of its input x: x + widened(widen(narrow(x))).
struct Alternation {
  Norm routed;
  const float* router;        // (streams, hidden)
  const float* prediction;    // (streams, streams, streams): of a stream, from a stream, by the router's outputs
  const float* correction;    // (streams, streams): of a stream, by the router's outputs; 1 is added
  const float* output_scale;  // (hidden): of the active row for the layer's own input; null: none
  Linear narrow, widen;
  Norm widened;
};

constexpr int64_t MOST_STREAMS = 8;
constexpr float LEAST_SQUARE = 1e-5f;  // of a stream that gets the size of another

// Any norm may be absent. `after_…` norms the output of a sublayer before it is added. A layer may have attention, a recurrent layer, or both,
// whose outputs are added; or neither; and a feed-forward network, or none.
struct Layer {
  Norm before_attention, after_attention, before_feed_forward, after_feed_forward, query, key;
  HeadNorms head_norms;
  int64_t head_norm_step;  // from the weights of a head's norm to those of the next head; 0: all heads share them
  int32_t parallel;        // 1: the feed-forward network has the input of attention, and no norm of its own; the outputs of both are added
  int32_t beside;          // 1: the mixture is beside the network of `gate_up` and `down`; the normed outputs of both are added
  Norm after_network;      // of that network, beside a mixture
  Linear query_key_value, attention_out, gate_up, down;
  const Alternation* alternation;  // null: the hidden rows are one stream
  int32_t sparse;  // 1: of the gate only what lies above mean + cutoff · deviation of the row is kept, less that
  float cutoff;
  int64_t whole_inner;  // numbers of a row of the gate on all ranks
  const Latent* latent;  // instead of the weights of `query_key_value`, whose outputs are the queries and one shared row; null: none
  Gate gate;
  Linear input_gate, input_projection;  // of the layer's own input, see LayerInputs
  Norm after_input;
  float attended_scale, fed_scale;  // of the outputs of attention or of a recurrent layer alone, and of the feed-forward network, before they are added
  float scale;  // of the hidden rows behind the layer
  const float* sinks;  // by head, the score of an additional position without a value; null: none
  int64_t window;  // positions that a token sees, itself included; 0: all
  int64_t chunk;   // positions of a chunk, beyond whose begin a token does not see; 0: there are none
  int64_t rotary;  // index into the model's; -1: the layer's heads are not rotated
  int64_t mixture;  // index into the model's, instead of `gate_up` and `down` or beside them; -1: none
  int64_t recurrent;    // index into the model's, instead of attention or beside it; -1: none
  int64_t shared_heads, head_dim;  // of keys and values, of all heads; no shared heads: the layer does not attend
  int64_t value_dim;               // numbers of a head's value, at most head_dim; its row in a slab is as long as a key's
  KeysAndValues stored;
  int32_t head_gates;  // 1: behind the values of `query_key_value` lies a gate of each head, whose sigmoid its output is multiplied by
  Norm value;      // of a head's value
  int64_t slab;    // index into those of a span: layers of one shape have one
  int64_t cache;   // index of the keys and values that it attends to in the slab
};

// Each layer has an input of its own for each token: (norm(projection(embedded token) · projected_scale) + what its id
// gives) · scale. Behind the feed-forward network the layer adds norm(input_projection(activation(input_gate(hidden row)) · input)).
struct LayerInputs {
  int64_t width;      // of a layer's input; 0: there are none
  Linear projection;  // outputs: depth · width
  Norm norm;          // of a layer's part
  float projected_scale, scale;
};

// Sums `count` floats over the ranks, in place. Anything but 0 is a failure.
using Reduce = int (*)(void* group, float* data, int64_t count);

struct Model {
  const Layer* layers;
  int64_t depth, hidden, heads;
  const Rotary* rotaries;
  int64_t rotary_count;
  const Mixture* mixtures;
  int64_t mixture_count;
  const RecurrentLayer* recurrent;
  int64_t recurrent_count;
  Kind cached;          // of keys and values: see cached.h
  int32_t output_gate;  // 1: behind the query of a head lies a gate of the head's output
  float attention_scale;
  float attention_cap, logit_cap;  // x becomes cap · tanh(x / cap); 0: stays
  LayerInputs inputs;
  int64_t streams, active;  // of layers with an `alternation`; the first stream are the embedded tokens
  const Linear *into_streams, *out_of_streams;  // by stream but for the first
  float logit_scale;
  Norm last;
  Linear head;
};

// Where one sequence's keys and values of the layers of one shape are.
struct Slab {
  char* keys;            // of the first layer: (shared heads, capacity) rows
  int64_t values;        // bytes from a layer's keys to its values; 0: its rows are both
  int64_t layer_stride;  // from a layer's keys to the next one's
  int64_t head_stride;   // from a head's rows to the next one's
};

// The tokens that one sequence adds, `count` of them from position `offset` on.
struct Span {
  int64_t slabs;         // its first one among the batch's
  int64_t first, count;  // its tokens among the batch's
  int64_t offset;
  float* state;          // of its recurrent layers; null: the model has none
  int64_t guesses;       // its last tokens that are guesses: they leave no trace in `state`
  int64_t first_guess;   // the first of them among the batch's guesses
};

struct Batch {
  const Span* spans;
  int64_t span_count;
  const Slab* slabs;
  int64_t slab_count;
  const int64_t* positions;  // by token
  float* hidden;             // (tokens, hidden): the embedded tokens; overwritten
  const float* layer_inputs; // (tokens, depth, width): what token ids give of the layers' own inputs
  int64_t tokens;
  const int64_t* sampled;    // tokens whose logits are asked for
  int64_t sampled_count;
  float* logits;             // (sampled, vocabulary)
  Reduce reduce;             // null: this rank has all of every layer
  int64_t ranks;
  void* group;
  const int64_t* axes;       // (3, tokens): positions in time, height and width; null: `positions` is all of them
  const int32_t* axis_of;    // by frequency, where there are `axes`
  const int64_t* marked;     // tokens whose rows get more after the first `added_layers` layers
  int64_t marked_count;
  const float* added;        // (added_layers, marked_count, hidden)
  int64_t added_layers;
  const int64_t* ends;       // by token, the position before which it sees its sequence; null: its own included
  float* guessed;            // where there are recurrent layers: what they get of the guesses, see recurrent/replay.h
  int64_t guess_count;
};

}  // namespace furrow
