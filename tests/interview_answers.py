"""Sentences of candidates, by question and point: those that make the point, and those that do not, though they use
its words. The patterns were written to tell the first set apart.
"""

SAID = {
    "several-heads": [
        (
            ["Each head has its own projection matrices, so the model can attend to different things simultaneously.",
             "One softmax gives one distribution per token; with eight heads a token gets eight of them."],
            ["Several heads make training faster because they run in parallel on the GPU.",
             "All heads share one set of weights and look at the same pattern."],
        ),
        (
            ["Because every head is d_model / h wide, the total compute and parameter count stay the same.",
             "It costs nothing extra: eight heads of 64 need as many FLOPs as one of 512."],
            ["Eight heads need eight times the parameters.",
             "The cost grows with the number of heads, so you pay for every head."],
        ),
        (
            ["The downside: each head only works in a 64-dimensional subspace, so its score matrix has low rank.",
             "You trade width per head for more heads: with too many, every head is too narrow to be useful."],
            ["There is no downside, more heads are always better.",
             "Each head gets the full 512 dimensions."],
        ),
    ],
    "complexity": [
        (
            ["Computing the scores takes O(n^2 d), it grows with the square of the sequence length.",
             "Every token is compared with every other token, so doubling the context quadruples that work."],
            ["It is linear in the sequence length.",
             "It is n log n, like sorting."],
        ),
        (
            ["The linear layers are O(n d^2).",
             "The four projections cost n times d_model squared each."],
            ["The projections are free, only the softmax costs anything.",
             "The projections are linear in d_model."],
        ),
        (
            ["For short texts the linear layers dominate; beyond about 2·d_model tokens the attention matrix does.",
             "Which term wins depends on whether n is larger than d."],
            ["The attention matrix always dominates.",
             "It always takes the same time, however long the text is."],
        ),
    ],
    "grouped": [
        (
            ["In GQA, groups of query heads share the same keys and values.",
             "You keep 32 query heads but use only 8 KV heads, each serving four queries."],
            ["In GQA, queries are shared and every head has its own keys and values.",
             "GQA groups tokens together so that fewer tokens are compared."],
        ),
        (
            ["The KV cache gets smaller by the group size, which is why servers like it.",
             "You store four times fewer keys and values per token."],
            ["The cache gets larger, because groups have to be stored too.",
             "It does not change the cache at all."],
        ),
        (
            ["The score computation is unchanged: every query head still compares with every key.",
             "The FLOPs for QK^T stay the same, only the memory traffic goes down."],
            ["It makes the score computation four times cheaper.",
             "It reduces the complexity from quadratic to linear."],
        ),
        (
            ["The extreme case with a single KV head is multi-query attention.",
             "MQA is GQA with one group."],
            ["With one key/value head it is the same as ordinary multi-head attention.",
             "MQA means that there are many more queries than in GQA."],
        ),
    ],
    "parameters": [
        (
            ["Four weight matrices, 512 by 512 each: Q, K, V and O.",
             "W_q, W_k, W_v and W_o all have 512² entries."],
            ["Three matrices of 512 × 512.",
             "One matrix per head, that is eight."],
        ),
        (
            ["Plus four bias vectors of 512.",
             "And each of the linear layers adds 512 biases, 2048 in total."],
            ["There are no biases in a linear layer.",
             "Biases are not parameters."],
        ),
        (
            ["1,050,624 in total.",
             "So 4 * 512 * 512 + 4 * 512 = 1050624."],
            ["1,048,576 in total.",
             "That makes 262,656 parameters, about 0.26 million."],
        ),
        (
            ["It doesn't depend on the number of heads.",
             "With 16 heads it would be the same number, the heads are only a reshape."],
            ["Multiply by 8, because every head has that many.",
             "More heads would mean more parameters."],
        ),
    ],
    "flops": [
        (
            ["The four linear layers need 4 · 2 · T · E² = 8TE² operations.",
             "Each projection is 2·T·E², and there are four of them."],
            ["The projections need T² · E operations.",
             "There is only one projection to count, 2·T·E."],
        ),
        (
            ["QK^T and the weighted sum are 2T²E each, so 4T²E together.",
             "Scores: 2·T·T·D for each head, times H heads, and the same again for weights times values."],
            ["The scores cost 4·T·E.",
             "The attention matrix costs nothing compared with the rest."],
        ),
        (
            ["I count a multiply-add as two FLOPs.",
             "One multiplication and one addition for each term, hence the factor 2."],
            ["A multiply-add is one operation, as everybody counts it.",
             "I ignore additions."],
        ),
    ],
    "memory": [
        (
            ["Every head holds a T × T matrix, so H·T² floats.",
             "It is quadratic in the sequence length: 8 × 1024 × 1024 numbers."],
            ["They take T numbers for each head.",
             "They take as much as the weights of the linear layers, d_model squared."],
        ),
        (
            ["During training they are saved for the backward pass.",
             "Autograd keeps the probabilities because their gradient needs them."],
            ["They can be thrown away at once, also in training.",
             "They are needed in inference only."],
        ),
        (
            ["FlashAttention goes over blocks of keys and never materializes the matrix.",
             "It uses an online softmax over tiles in SRAM, so only O(T) is stored."],
            ["A fused kernel stores the matrix in float16 to save half of it.",
             "A fused kernel compresses the matrix and writes it to disk."],
        ),
    ],
    "root": [
        (
            ["If q and k have unit variance, their dot product has variance d.",
             "The magnitude of the scores increases with the dimension, like its square root."],
            ["Dot products get smaller with more dimensions, so we make them larger.",
             "It makes the rows sum to one."],
        ),
        (
            ["Large logits push the softmax into saturation, it becomes nearly one-hot.",
             "Otherwise one weight would be almost 1 and all others almost 0."],
            ["Without it the softmax would be uniform.",
             "It keeps the softmax from being negative."],
        ),
        (
            ["There the softmax has tiny gradients and learning stalls.",
             "In that regime the derivative is close to zero."],
            ["It prevents exploding gradients in the embedding layer.",
             "Gradients are not affected by it."],
        ),
        (
            ["d is the dimension of one head, d_k, so 64 and not 512.",
             "You take the head size, d_model divided by the number of heads."],
            ["d is d_model, so √512.",
             "d is the number of tokens."],
        ),
    ],
    "cache": [
        (
            ["In decoding we store the keys and values of all previous tokens, since they do not change.",
             "Past K and V stay the same under a causal mask, so we reuse them instead of computing them again."],
            ["It stores the queries of past tokens.",
             "It stores the generated text, so that the same prompt is answered at once."],
        ),
        (
            ["Each new token then needs only one row of scores, linear work instead of quadratic.",
             "Without it every step would reprocess the whole prefix."],
            ["A new token costs O(T²) with the cache.",
             "Each step takes constant time, however long the text is."],
        ),
        (
            ["Its size is 2 × layers × KV heads × head_dim × tokens × bytes.",
             "Two tensors per layer, each with n_kv_heads times head_dim numbers for every token."],
            ["Its size does not depend on the length.",
             "It is T² numbers for each head."],
        ),
        (
            ["Decoding becomes memory-bandwidth bound: the whole cache is read for every token.",
             "The bottleneck is then reading it from HBM, not arithmetic."],
            ["Decoding is then limited by the matrix multiplications.",
             "Reading it takes no time."],
        ),
    ],
    "mask": [
        (
            ["If you zero weights after the softmax, the rest no longer add up to one.",
             "Masking afterwards breaks the normalization, the hidden keys have already taken part of the mass."],
            ["After the softmax the rows still sum to one.",
             "Zero after the softmax is the same thing, only slower."],
        ),
        (
            ["e to the minus infinity is exactly zero.",
             "exp(-inf) = 0, so hidden positions get no weight at all."],
            ["exp(-inf) is minus infinity.",
             "A score of 0 gives a weight of exactly zero."],
        ),
        (
            ["-1e9 overflows in half precision.",
             "fp16 can't represent -1e9, its limit is about 65k."],
            ["-1e9 is more precise than -inf in float16.",
             "-1e9 is fine in fp16."],
        ),
        (
            ["A row where everything is masked gives NaN, 0/0.",
             "The catch: a fully padded query becomes nan and has to be handled."],
            ["A row where everything is masked gives a uniform average with −∞.",
             "NaN cannot happen."],
        ),
    ],
    "contiguous": [
        (
            ["transpose only swaps the strides, the data stays where it is.",
             "After transpose the tensor is a view with a different memory layout."],
            ["transpose moves the data in memory.",
             "transpose sorts the tensor."],
        ),
        (
            ["view needs compatible strides and throws an error otherwise.",
             "You can't merge two dimensions with view if they are not next to each other in memory."],
            ["view would silently give the wrong numbers.",
             "view works on every tensor, contiguous() is for speed."],
        ),
        (
            ["contiguous() makes a copy in the right order; reshape would do that too.",
             "It rewrites the tensor into row-major order, which costs a copy."],
            ["contiguous() only sets a flag and copies nothing.",
             "contiguous() moves the tensor to the GPU."],
        ),
    ],
    "output-projection": [
        (
            ["It lets information from different heads interact.",
             "W_o blends the outputs of all heads into one vector."],
            ["It normalizes the output.",
             "It turns the output into probabilities over the vocabulary."],
        ),
        (
            ["Without it, each slice of the output would come from one head only.",
             "The heads would just be concatenated, every feature depending on a single head."],
            ["Without it the output would have the wrong shape.",
             "Nothing would be lost, it is only there for speed."],
        ),
    ],
}  # fmt: skip

# Written after the patterns were final, and never used to change them.
HELD_OUT = {
    "several-heads": [
        (["Different heads can specialise, one on syntax, another on coreference.",
          "A single head has to average all relations into one attention pattern; many heads don't."],
         ["Multiple heads reduce overfitting."]),
        (["Parameter count doesn't change, you only split d_model.",
          "Total FLOPs are identical because d_k shrinks as h grows."],
         ["You need h times more compute."]),
        (["Each head sees just d_model/h features, so it is less expressive on its own."],
         ["Heads become more expressive the more of them there are."]),
    ],
    "complexity": [
        (["n squared in tokens.", "Attention is O(T^2 * d)."], ["Attention is O(T * d)."]),
        (["Q, K, V and output projections are 4 n d^2.", "Projecting costs O(T E²)."], ["Projecting costs O(T E)."]),
        (["When n < d the projections are the bigger part.",
          "It only becomes attention-dominated at long context."],
         ["Both parts are equally expensive regardless of n."]),
    ],
    "grouped": [
        (["GQA lets multiple Q heads use one K/V head.", "Fewer kv heads than q heads."],
         ["GQA uses one query for all keys."]),
        (["That cuts KV-cache memory by 4x for 32/8.", "Main benefit: smaller cache at inference."],
         ["The cache is twice as big."]),
        (["Attention FLOPs are identical.", "It does not save compute in the scores."],
         ["You save a factor of four in attention FLOPs."]),
        (["Going down to one kv head gives you MQA."], ["MQA and MHA are the same thing."]),
    ],
    "parameters": [
        (["4 × d², for q, k, v and output."], ["2 × 512 × 512 for keys and values."]),
        (["Then add 4·512 for the biases.", "Bias terms: 512 each."],
         ["I leave out the bias because it is never used."]),
        (["1050624", "It's 1 050 624."], ["It's 1,050,623.", "Roughly two million."]),
        (["h doesn't matter here, only d_model does.", "The head count has no influence."],
         ["The head count scales it linearly."]),
    ],
    "flops": [
        (["Projections: 8 T E^2.", "4 matmuls of 2*T*E*E."], ["Projections: 8 T E."]),
        (["plus 4 T^2 E for QK^T and AV.", "Attention itself is quadratic: two T×T×D matmuls per head."],
         ["plus 4 T E for the attention."]),
        (["mul + add = 2 flops.", "with 2 FLOPs per MAC."], ["with 1 FLOP per MAC."]),
    ],
    "memory": [
        (["seq² per head per sample.", "B*H*T*T floats."], ["B*H*T*D floats."]),
        (["You need them again for backprop, so they stay in memory."],
         ["Backprop recomputes nothing and needs nothing."]),
        (["Flash attention streams K/V in chunks and rescales, so the T×T matrix never hits HBM."],
         ["Flash attention skips small weights."]),
    ],
    "root": [
        (["Var(q·k) = d_k, so std is sqrt(d_k).", "Summing d products makes logits bigger as d grows."],
         ["It makes q and k orthogonal."]),
        (["Softmax collapses onto the max otherwise.", "You'd get a near-argmax."],
         ["You would get a flat distribution."]),
        (["and backprop through a saturated softmax gives almost nothing."],
         ["and gradients would explode."]),
        (["It's d_head = d_model / h.", "Use the per-head dimension."], ["Use the embedding dimension."]),
    ],
    "cache": [
        (["K and V for earlier positions are saved so you don't compute them twice."],
         ["The attention weights of earlier positions are saved."]),
        (["Per step you go from quadratic to linear."], ["Per step you go from linear to quadratic."]),
        (["2 * n_layers * n_kv_heads * d_head * seq_len * 2 bytes."], ["n_layers * vocab_size bytes."]),
        (["Generation is bandwidth-limited because you stream the cache each step."],
         ["Generation is compute-limited because of the cache."]),
    ],
    "mask": [
        (["Post-softmax zeroing leaves rows that sum to less than 1."],
         ["Post-softmax zeroing leaves rows that sum to 1."]),
        (["Softmax of -inf is 0."], ["Softmax of -inf is NaN for every key."]),
        (["In fp16 the largest magnitude is 65504, so -1e9 turns into -inf anyway."], ["In fp16, -1e9 is exact."]),
        (["If all keys of a query are hidden you divide zero by zero and get NaN."],
         ["If all keys of a query are hidden you get zeros automatically."]),
    ],
    "contiguous": [
        (["Transposing is just metadata, strides are permuted."], ["Transposing reorders the storage."]),
        (["view() refuses non-contiguous memory here: RuntimeError."], ["view() is fine with non-contiguous memory."]),
        ([".contiguous() materialises a new tensor in row-major order."], [".contiguous() is a no-op."]),
    ],
    "output-projection": [
        (["It combines what the heads found.", "Heads can't communicate otherwise."], ["It scales the result."]),
        (["You'd have h independent chunks glued together, each from its own head."],
         ["You would have the mean of the heads."]),
    ],
}  # fmt: skip
